//! Models by name, from a small hub of the test's own: what is fetched, kept, gone on with, and said when it cannot be had.
//!
//! The hub serves the tiny fixture as `org/tiny`, three GGUF files as `org/gguf`, and the former again as `org/private` to who
//! has the token. It answers as the public one does, as far as the client looks at it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::{Said, Scratch, command, fixture, tiny};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub has and has been asked.
#[derive(Default)]
struct Shared {
    repos: BTreeMap<&'static str, BTreeMap<String, Vec<u8>>>,
    /// Bytes of a file after which a connection is closed; 0 is never.
    cut: AtomicUsize,
    /// Path and range of every request.
    heard: Mutex<Vec<String>>,
}

struct Hub {
    address: String,
    shared: Arc<Shared>,
    home: Scratch,
}

impl Hub {
    fn start(name: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        let read = |path: PathBuf| std::fs::read(path).expect("a fixture");
        let names = std::fs::read_dir(tiny()).expect("the fixture").flatten().map(|entry| entry.file_name());
        let files: BTreeMap<String, Vec<u8>> = names
            .map(|name| (name.to_string_lossy().into_owned(), read(fixture("llama-tiny").join(&name))))
            .chain([
                ("consolidated.safetensors".into(), vec![0; 64]),
                ("original/model.safetensors".into(), vec![0; 64]),
            ])
            .collect();
        let ggufs = [("m-Q4_0.gguf", "llama-q4_0"), ("m-Q4_1.gguf", "llama-q4_1"), ("mmproj-f16.gguf", "llama-q4_0")];
        let ggufs = ggufs.map(|(name, file)| (name.into(), read(fixture(&format!("gguf/{file}.gguf"))))).into();
        let repos = [("org/tiny", files.clone()), ("org/private", files), ("org/gguf", ggufs)].into();
        let shared = Arc::new(Shared { repos, ..Shared::default() });
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let serving = Arc::clone(&serving);
                // A client that goes away is no concern of the hub's.
                std::thread::spawn(move || drop(answer(&serving, connection)));
            }
        });
        Self { address, shared, home: Scratch::new(name) }
    }

    /// Runs the binary with the hub's variables and some more.
    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
        let mut command = command();
        command.env("HF_HOME", &self.home.0).env("HF_ENDPOINT", &self.address).env_remove("HF_HUB_OFFLINE");
        command.args(arguments).envs(variables.iter().copied()).output().expect("the binary runs").into()
    }

    fn generate(&self, model: &str, variables: &[(&str, &str)]) -> Said {
        let arguments = ["generate", model, "--prompt=a", "--max-tokens=2", "--threads=1", "--device=cpu", "--json"];
        self.run(&arguments, variables)
    }

    /// Requests for files since the last time, but for those that ask for their size only.
    fn fetched(&self) -> Vec<String> {
        let mut heard = std::mem::take(&mut *self.shared.heard.lock().expect("no thread panicked"));
        heard.retain(|line| line.contains("/resolve/") && !line.ends_with("bytes=0-0"));
        heard
    }

    fn cache(&self, repo: &str) -> PathBuf {
        self.home.0.join("hub").join(format!("models--{}", repo.replace('/', "--")))
    }
}

/// Where nobody listens.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    format!("http://{}", listener.local_addr().expect("bound"))
}

fn etag(repo: &str, file: &str) -> String {
    format!("{repo}{file}").bytes().filter(u8::is_ascii_alphanumeric).map(char::from).collect()
}

fn answer(hub: &Shared, mut connection: TcpStream) -> std::io::Result<()> {
    let mut lines = BufReader::new(connection.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let (mut range, mut token) = (String::new(), false);
    for line in lines {
        let line = line?;
        match line.to_lowercase().split_once(": ") {
            Some(("range", value)) => range = value.to_owned(),
            Some(("authorization", value)) => token = value == "bearer right",
            _ if line.is_empty() => break,
            _ => {}
        }
    }
    hub.heard.lock().expect("no thread panicked").push(format!("{path} {range}"));
    let refuse = |connection: &mut TcpStream, status: &str, code: &str| {
        write!(
            connection,
            "HTTP/1.1 {status}\r\nx-error-code: {code}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
    };
    let trimmed = path.trim_start_matches("/api/models/").trim_start_matches('/');
    let repo = trimmed.splitn(3, '/').take(2).collect::<Vec<_>>().join("/");
    let Some(files) = hub.repos.get(repo.as_str()).filter(|_| repo != "org/private" || token) else {
        let status = if token { "404 Not Found" } else { "401 Unauthorized" };
        return refuse(&mut connection, status, "RepoNotFound");
    };
    let rest = trimmed[repo.len() + 1..].to_owned();
    if let Some(revision) = rest.strip_prefix("revision/") {
        if !["main", "v1", COMMIT].contains(&revision) {
            return refuse(&mut connection, "404 Not Found", "RevisionNotFound");
        }
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string();
        let len = body.len();
        return write!(connection, "HTTP/1.1 200 OK\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}");
    }
    let name = rest.strip_prefix(&format!("resolve/{COMMIT}/")).unwrap_or_default();
    let Some(bytes) = files.get(name) else { return refuse(&mut connection, "404 Not Found", "EntryNotFound") };
    let (first, last) = range.trim_start_matches("bytes=").split_once('-').unwrap_or(("0", ""));
    let (total, first) = (bytes.len(), first.parse().unwrap_or(0));
    let end = last.parse().map_or(total, |last: usize| last + 1).min(total);
    write!(
        connection,
        "HTTP/1.1 206 Partial Content\r\netag: \"{}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-range: bytes {first}-{}/{total}\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        etag(&repo, name),
        end - 1,
        end - first
    )?;
    let cut = hub.cut.load(Ordering::Relaxed);
    let sent = if cut == 0 { end } else { end.min(first + cut) };
    connection.write_all(&bytes[first..sent])
}

#[test]
fn a_model_is_fetched_once_and_found_again() {
    let hub = Hub::start("hub fetch");
    let path = PathBuf::from(hub.run(&["pull", "org/tiny"], &[]).ok().trim_end());
    assert_eq!(path, hub.cache("org/tiny").join("snapshots").join(COMMIT));
    let fetched = hub.fetched();
    assert!(fetched.iter().any(|line| line.contains("/model.safetensors ")), "{fetched:?}");
    assert!(!fetched.iter().any(|line| line.contains("consolidated") || line.contains("original")), "{fetched:?}");
    for name in ["config.json", "model.safetensors"] {
        let (got, want) = (std::fs::read(path.join(name)), std::fs::read(fixture("llama-tiny").join(name)));
        assert_eq!(got.expect("it was fetched"), want.expect("the fixture"), "{name}");
    }
    assert_eq!(std::fs::read_to_string(hub.cache("org/tiny").join("refs/main")).expect("a ref"), COMMIT);
    let answer = hub.generate("org/tiny", &[]).json();
    assert_eq!(hub.fetched(), Vec::<String>::new(), "all of it is in the cache");
    // Neither asks the hub for anything; an unreachable one is said, not an error.
    let offline = hub.generate("org/tiny", &[("HF_HUB_OFFLINE", "1")]).json();
    let cut_off = hub.generate("org/tiny", &[("HF_ENDPOINT", &nowhere())]);
    assert!(cut_off.err.contains("cannot be reached"), "{}", cut_off.err);
    assert_eq!(answer["token_ids"], offline["token_ids"]);
    assert_eq!(answer["token_ids"], cut_off.json()["token_ids"]);
    // A tag and the commit itself are as good a name.
    for revision in ["v1", COMMIT] {
        let path_of = hub.run(&["pull", &format!("org/tiny@{revision}")], &[]).ok();
        assert_eq!(PathBuf::from(path_of.trim_end()), path);
        hub.run(&["pull", "org/tiny", "--revision", revision, "--hf-offline"], &[]).ok();
    }
}

#[test]
fn what_is_not_cached_needs_a_network_and_says_so() {
    let hub = Hub::start("hub offline");
    let offline = hub.generate("org/tiny", &[("HF_HUB_OFFLINE", "1")]);
    offline.refused(&["org/tiny", "HF_HUB_OFFLINE", "kittiwake pull org/tiny"]);
    let cut_off = hub.generate("org/tiny", &[("HF_ENDPOINT", &nowhere())]);
    cut_off.refused(&["org/tiny", "cannot be reached", "kittiwake pull org/tiny"]);
    // Half of it is not it.
    hub.run(&["pull", "org/tiny"], &[]).ok();
    std::fs::remove_file(hub.cache("org/tiny").join("snapshots").join(COMMIT).join("model.safetensors"))
        .expect("a link");
    hub.generate("org/tiny", &[("HF_HUB_OFFLINE", "1")]).refused(&["org/tiny", "kittiwake pull org/tiny"]);
}

#[test]
fn half_a_file_is_gone_on_with() {
    let hub = Hub::start("hub resume");
    let blobs = hub.cache("org/gguf").join("blobs");
    std::fs::create_dir_all(&blobs).expect("a directory");
    let whole = std::fs::read(fixture("gguf/llama-q4_1.gguf")).expect("the fixture");
    let blob = etag("org/gguf", "m-Q4_1.gguf");
    std::fs::write(blobs.join(format!("{blob}.part")), &whole[..1000]).expect("a part");
    let path = hub.run(&["pull", "org/gguf:Q4_1"], &[]).ok();
    let fetched = hub.fetched();
    assert_eq!(fetched.len(), 1, "{fetched:?}");
    assert!(fetched[0].ends_with("bytes=1000-"), "{fetched:?}");
    assert!(std::fs::read(path.trim_end()).expect("it was fetched") == whole);
    // A part that is longer than the file, or as long and never put in place, is of no use.
    for len in [whole.len(), whole.len() + 7] {
        std::fs::remove_dir_all(hub.cache("org/gguf")).expect("it was there");
        std::fs::create_dir_all(&blobs).expect("a directory");
        std::fs::write(blobs.join(format!("{blob}.part")), vec![1; len]).expect("a part");
        let path = hub.run(&["pull", "org/gguf:Q4_1"], &[]).ok();
        assert!(std::fs::read(path.trim_end()).expect("it was fetched") == whole, "{len} bytes");
    }
}

#[test]
fn a_connection_that_closes_early_is_tried_again_and_then_an_error() {
    let hub = Hub::start("hub cut");
    hub.shared.cut.store(20_000, Ordering::Relaxed);
    let said =
        hub.run(&["pull", "org/gguf:m-Q4_1.gguf"], &[]).refused(&["m-Q4_1.gguf", "ended after 100000 of", "goes on"]);
    assert!(!said.contains("panicked"), "{said}");
    let snapshot = hub.cache("org/gguf").join("snapshots").join(COMMIT);
    assert!(!snapshot.join("m-Q4_1.gguf").exists(), "half a file must not pass for a whole one");
    hub.fetched();
    hub.shared.cut.store(0, Ordering::Relaxed);
    hub.run(&["pull", "org/gguf:m-Q4_1.gguf"], &[]).ok();
    assert!(hub.fetched()[0].ends_with("bytes=100000-"));
    let whole = std::fs::read(fixture("gguf/llama-q4_1.gguf")).expect("the fixture");
    assert!(std::fs::read(snapshot.join("m-Q4_1.gguf")).expect("it was fetched") == whole);
}

#[test]
fn what_the_hub_refuses_is_said_with_what_to_do() {
    let hub = Hub::start("hub refusals");
    hub.run(&["pull", "org/tiny@v9"], &[]).refused(&["org/tiny@v9", "404", "no revision 'v9'"]);
    hub.run(&["pull", "org/nothing"], &[]).refused(&["org/nothing", "401", "HF_TOKEN"]);
    hub.run(&["pull", "org/nothing"], &[("HF_TOKEN", "right")]).refused(&["org/nothing", "404", "no such repository"]);
    hub.run(&["pull", "org/private"], &[]).refused(&["org/private", "401", "HF_TOKEN"]);
    hub.run(&["pull", "org/private"], &[("HF_TOKEN", "wrong")]).refused(&["org/private", "401", "the token may not"]);
    hub.run(&["pull", "org/private"], &[("HF_TOKEN", "right")]).ok();
    // Or from the file that the hub's own tool writes.
    std::fs::remove_dir_all(hub.cache("org/private")).expect("it was fetched");
    hub.home.file("token", "right\n");
    hub.run(&["pull", "org/private"], &[]).ok();
    hub.run(&["pull", "demo"], &[]).refused(&["'demo'", "org/name"]);
}

#[test]
fn a_gguf_is_chosen_by_its_quantisation_or_not_at_all() {
    let hub = Hub::start("hub gguf");
    let answer = hub.generate("org/gguf:q4_0", &[]).json();
    assert_eq!(answer["token_ids"].as_array().map(Vec::len), Some(2));
    assert_eq!(hub.fetched().len(), 1, "one file of three");
    hub.run(&["pull", "org/gguf"], &[]).refused(&["org/gguf", "m-Q4_0.gguf", "m-Q4_1.gguf"]);
    hub.run(&["pull", "org/gguf:Q8_0"], &[]).refused(&["'Q8_0'", "m-Q4_0.gguf", "m-Q4_1.gguf"]);
    assert_eq!(hub.fetched(), Vec::<String>::new());
}

#[test]
fn a_path_that_exists_wins() {
    let scratch = Scratch::new("hub paths");
    let folder = scratch.0.join("org/tiny");
    std::fs::create_dir_all(&folder).expect("a directory");
    for entry in std::fs::read_dir(tiny()).expect("the fixture").flatten() {
        std::fs::copy(entry.path(), folder.join(entry.file_name())).expect("a copy");
    }
    let mut arguments = vec!["generate", "org/tiny", "--prompt=a", "--max-tokens=1", "--threads=1", "--device=cpu"];
    let dir = scratch.0.display().to_string();
    arguments.extend(["--download-dir", &dir]);
    super::kittiwake(&arguments).ok();
    arguments.extend(["--revision", "v2"]);
    super::kittiwake(&arguments).refused(&["--revision v2", "local path"]);
}
