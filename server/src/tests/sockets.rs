//! Real sockets before the whole server: clients that stall, crowd, or speak older HTTP.
//!
//! Invariant: no test measures time. The limit on a socket is a second; a client that is not cut off after it makes its test
//! wait for the end of `PATIENCE`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::Server;
use crate::ServeError;

/// Long enough for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A server that listens.
pub struct Listening {
    pub server: Server,
    pub address: SocketAddr,
    /// What SIGTERM does.
    pub stop: mpsc::Sender<()>,
    pub serving: JoinHandle<Result<(), ServeError>>,
}

impl Listening {
    pub fn start(server: Server) -> Self {
        // As small as the system allows, so that a little output fills what lies between server and client.
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_send_buffer_size(4096).expect("a buffer");
        socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let listener = socket.listen(1024).expect("a listener");
        let address = listener.local_addr().expect("an address");
        let (stop, signals) = mpsc::channel(2);
        let serving = tokio::spawn(crate::serve(listener, Arc::clone(&server.state), signals));
        Self { server, address, stop, serving }
    }

    /// Clients have a second.
    fn impatient() -> Self {
        Self::start(Server::with(|config, _| config.socket_timeout_s = 1))
    }

    pub async fn connect(&self) -> TcpStream {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4096).expect("a buffer");
        socket.connect(self.address).await.expect("the server listens")
    }

    /// A connection on which `text` has been sent.
    pub async fn send(&self, text: &str) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(text.as_bytes()).await.expect("sent");
        stream
    }

    async fn is_well(&self) {
        let answer = rest(self.send("GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

/// Everything up to the end of the connection, which must come.
pub async fn rest(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end too: what came before it counts.
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("the connection ends");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A completion as an HTTP request.
pub fn completion(version: &str, headers: &str, body: &Value) -> String {
    let body = body.to_string();
    let head = format!("POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{headers}");
    format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_nobody_reads_is_aborted() {
    let listening = Listening::impatient();
    let server = &listening.server;
    // About a megabyte by the step at which the engine is held; hyper holds back a quarter of that.
    server.controls.hold_after(190);
    let body = json!({"prompt": "a b c", "max_tokens": 200, "n": 8, "logprobs": 5, "stream": true, "ignore_eos": true});
    let unread = listening.send(&completion("1.1", "", &body)).await;
    let aborted = async {
        while server.metric("vllm:request_success_total{finished_reason=\"abort\"}").await < 8.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, aborted).await.expect("a socket that takes nothing is closed");
    // The step that is held may end, no other of these sequences.
    server.controls.hold_after(1);
    server.idle().await;
    server.controls.release();
    assert_eq!(server.complete(json!({"prompt": "a", "max_tokens": 3})).await.json()["usage"]["completion_tokens"], 3);
    listening.is_well().await;
    drop(unread);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_never_ends_is_cut_off() {
    let listening = Listening::impatient();
    for head in ["", "G", "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"] {
        let stalled = listening.send(head).await;
        listening.is_well().await;
        let answer = rest(stalled).await;
        assert!(!answer.contains(" 200 "), "{answer}");
    }
    // One byte after the other is no better than none.
    let mut dripping = listening.send("GET /health HTTP/1.1\r\nX: ").await;
    let drip = async {
        while dripping.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await
        }
    };
    tokio::time::timeout(PATIENCE, drip).await.expect("the connection is closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_never_ends_is_408() {
    let listening = Listening::impatient();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n";
    for unfinished in ["Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"] {
        let stalled = listening.send(&format!("{head}{unfinished}")).await;
        let answer = rest(stalled).await;
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("\"code\":408"), "{answer}");
    }
    let (read, mut write) = listening.send(&format!("{head}Content-Length: 1000000\r\n\r\n{{")).await.into_split();
    let drip = tokio::spawn(async move {
        while write.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut start = [0; 12];
    let mut read = read;
    let answered = tokio::time::timeout(PATIENCE, read.read_exact(&mut start)).await.expect("an answer comes");
    answered.expect("an answer comes");
    assert_eq!(&start, b"HTTP/1.1 408", "never silent, and never done");
    drip.abort();
    listening.is_well().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_announced_too_long_is_413_although_nothing_comes() {
    let listening = Listening::start(Server::new());
    for headers in ["", "Expect: 100-continue\r\n"] {
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}");
        let answer = rest(listening.send(&format!("{head}Content-Length: 99999999999\r\n\r\n{{")).await).await;
        assert!(answer.contains("HTTP/1.1 413") && answer.contains("\"code\":413"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_requests_are_answered_in_order() {
    let listening = Listening::start(Server::new());
    let ask = |prompt: &str, headers: &str| {
        completion("1.1", headers, &json!({"prompt": prompt, "max_tokens": 2, "echo": true}))
    };
    let sent = [ask("first,", ""), ask("second,", ""), ask("third,", "Connection: close\r\n")].concat();
    let answer = rest(listening.send(&sent).await).await;
    let places = ["first,", "second,", "third,"].map(|prompt| answer.find(prompt).expect("an answer"));
    assert!(places.is_sorted(), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http_1_0_client_gets_a_stream_without_chunks_that_ends_with_the_connection() {
    let listening = Listening::start(Server::new());
    let body = json!({"prompt": "a", "max_tokens": 5, "temperature": 0, "stream": true});
    let answer = rest(listening.send(&completion("1.0", "", &body)).await).await;
    let (head, events) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.0 200") && !head.to_lowercase().contains("transfer-encoding"), "{head}");
    assert!(events.starts_with("data: {") && events.ends_with("data: [DONE]\n\n"), "{events}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_silent_connections_hold_nobody_up() {
    let listening = Listening::start(Server::new());
    let mut silent = Vec::new();
    for i in 0..200 {
        silent.push(listening.send(["", "POST /v1/completions HTTP/1.1\r\nContent-Le"][i % 2]).await);
    }
    let body = json!({"prompt": "a", "max_tokens": 5});
    let answer = rest(listening.send(&completion("1.1", "Connection: close\r\n", &body)).await).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_panics_is_500_for_its_requests_and_ends_the_server_with_an_error() {
    let listening = Listening::start(Server::new());
    let server = &listening.server;
    server.controls.hold_after(1);
    let mut streaming =
        listening.send(&completion("1.1", "", &json!({"prompt": "a", "max_tokens": 9, "stream": true}))).await;
    let mut start = [0; 12];
    streaming.read_exact(&mut start).await.expect("the stream begins");
    assert_eq!(&start, b"HTTP/1.1 200", "it has its first token");
    let whole =
        listening.send(&completion("1.1", "Connection: close\r\n", &json!({"prompt": "a", "max_tokens": 9}))).await;
    let both = async {
        while server.state.engine.stats().num_running + server.state.engine.stats().num_waiting < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, both).await.expect("both requests arrive");
    server.controls.panic();
    server.controls.release();
    let answer = rest(whole).await;
    assert!(answer.starts_with("HTTP/1.1 500") && answer.contains("\"type\":\"server_error\""), "{answer}");
    let answer = rest(streaming).await;
    assert!(answer.contains("data: {\"error\":") && !answer.contains("[DONE]"), "{answer}");
    let ended = tokio::time::timeout(PATIENCE, listening.serving).await.expect("the server ends").expect("joined");
    assert!(matches!(&ended, Err(ServeError::Engine(why)) if why.contains("on purpose")), "{ended:?}");
    assert_eq!(server.state.engine.stats().num_running, 0);
}
