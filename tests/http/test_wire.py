"""The wire as other programs read it: our OpenAPI document against real answers, Prometheus' text, a fuzzer, signals, limits.

Run like `test_openai.py`.
"""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest

from harness import NAME, PATIENCE_S, Server

try:
    import jsonschema
    import openapi_spec_validator
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as missing:
    sys.exit(f"{missing}: tests/run.sh installs what tests/http/requirements.txt lists")

BINARY = os.environ["KITTIWAKE_BINARY"]
MODEL = os.environ["KITTIWAKE_MODEL"]
CHAT = {"messages": [{"role": "user", "content": "Tell me about the sea"}], "max_tokens": 6, "temperature": 0}
TEXT = {"prompt": "The sea is", "max_tokens": 6, "temperature": 0}
LONG = {"prompt": "The sea is", "max_tokens": 400, "n": 64, "ignore_eos": True}


def setUpModule():
    global server
    server = Server(BINARY, MODEL)


def tearDownModule():
    server.kill()


def events(path, body):
    status, _, text = server.request("POST", path, {**body, "stream": True})
    assert status == 200 and text.endswith("data: [DONE]\n\n"), text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def closed(schema):
    """The schema, with every object that names its properties forbidding others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


class Document(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.document = json.loads(server.request("GET", "/openapi.json")[2])

    def conforms(self, name, answer):
        schema = {"$ref": f"#/components/schemas/{name}", "components": closed(self.document["components"])}
        jsonschema.Draft202012Validator(schema).validate(answer)

    def test_it_is_an_openapi_document(self):
        self.assertEqual(self.document["openapi"], "3.1.0")
        openapi_spec_validator.validate(self.document)
        with self.assertRaises(jsonschema.ValidationError):
            self.conforms("Detokenized", {"prompt": "", "more": 1})

    def test_answers_are_what_it_says_and_have_nothing_more(self):
        asked = [
            {},
            {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
            {"prompt_logprobs": 2, "n": 2, "temperature": 1},
            {"stop": "e", "max_tokens": 60},
            {"stop_token_ids": list(range(0, 512, 3)), "max_tokens": 60},
        ]
        for options in asked:
            status, answer = server.post("/v1/chat/completions", {**CHAT, **options})
            self.assertEqual(status, 200, answer)
            self.conforms("ChatCompletion", answer)
        for options in (*asked[2:], {"echo": True, "logprobs": 2, "return_token_ids": True}, {"logprobs": 0}):
            status, answer = server.post("/v1/completions", {**TEXT, **options})
            self.assertEqual(status, 200, answer)
            self.conforms("Completion", answer)
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for options in ({}, usage, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2, "temperature": 1}):
            for event in events("/v1/chat/completions", {**CHAT, **options}):
                self.conforms("ChatChunk", event)
        for options in ({}, usage, {"echo": True, "logprobs": 2, "return_token_ids": True}):
            for event in events("/v1/completions", {**TEXT, **options}):
                self.conforms("Completion", event)
        for name, path, body in (
            ("Tokenized", "/tokenize", {"prompt": "a"}),
            ("Tokenized", "/tokenize", {"messages": CHAT["messages"], "return_token_strs": True}),
            ("Detokenized", "/detokenize", {"tokens": [70, 71]}),
        ):
            self.conforms(name, server.post(path, body)[1])
        for name, path in (("ModelList", "/v1/models"), ("ModelCard", f"/v1/models/{NAME}")):
            self.conforms(name, json.loads(server.request("GET", path)[2]))
        for status, body in (
            server.post("/v1/completions", {}),
            server.post("/v1/completions", {**TEXT, "model": "other"}),
            server.post("/v1/embeddings", {}),
        ):
            self.assertGreaterEqual(status, 400)
            self.conforms("Error", body)

    def test_a_fuzzer_that_reads_it_finds_no_fault(self):
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
        host = "http://%s:%d" % server.address
        # Deterministic: the same requests every time.
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", host + "/openapi.json"]
        command += ["--url", host, "--phases", "coverage,fuzzing", "--max-examples", "5", "--generation-deterministic"]
        command += ["--checks", checks, "--warnings", "off", "--no-color"]
        with tempfile.TemporaryDirectory() as cwd:
            done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=5 * PATIENCE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(" passed", done.stdout)
        server.wait_idle()
        self.assertEqual(server.post("/v1/completions", TEXT)[0], 200)


class Options(unittest.TestCase):
    def ids(self, **options):
        status, answer = server.post("/v1/completions", {**TEXT, "max_tokens": 24, "return_token_ids": True, "ignore_eos": True, **options})
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]["token_ids"]

    def test_only_allowed_ids_are_drawn(self):
        allowed = [90, 70, 80, 70]
        for options in ({}, {"temperature": 1, "seed": 1}, {"frequency_penalty": 2, "logit_bias": {"5": 100}}):
            ids = self.ids(allowed_token_ids=allowed, **options)
            self.assertEqual(len(ids), 24)
            self.assertLessEqual(set(ids), set(allowed))

    def test_a_bad_word_is_not_said(self):
        said = self.ids()
        for token in set(said):
            text = server.post("/detokenize", {"tokens": [token]})[1]["prompt"]
            same = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
            if text.strip() == text and text and same == [token]:
                break
        else:
            self.fail(f"no token of {said} is a word of its own")
        banned = self.ids(bad_words=[text])
        self.assertNotIn(token, banned)
        # What comes before the word's first place is the same.
        self.assertEqual(banned[: said.index(token)], said[: said.index(token)])

    def test_the_same_number_is_written_the_same_way(self):
        choice = server.post("/v1/completions", {**TEXT, "logprobs": 3})[1]["choices"][0]
        for token, logprob, top in zip(*(choice["logprobs"][key] for key in ("tokens", "token_logprobs", "top_logprobs"))):
            self.assertEqual(top[token], logprob)


def families(which):
    _, _, text = which.request("GET", "/metrics")
    return {family.name: family for family in text_string_to_metric_families(text)}


def counters(which):
    """Every series that may only grow."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families(which).values()
        for sample in family.samples
        if family.type == "counter" or sample.name.endswith(("_bucket", "_count"))
    }


class Metrics(unittest.TestCase):
    FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    INTER = "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
    WHOLE = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
    TOKENS = "1 2 5 10 20 50 100 200 500"
    NAMES = {
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "num_requests_waiting_by_reason": "gauge",
        "kv_cache_usage_perc": "gauge",
        "num_replaced_kernels": "gauge",
        "cache_config_info": "gauge",
        "prefix_cache_queries": "counter",
        "prefix_cache_hits": "counter",
        "num_preemptions": "counter",
        "prompt_tokens": "counter",
        "generation_tokens": "counter",
        "prompt_tokens_cached": "counter",
        "prompt_tokens_by_source": "counter",
        "request_success": "counter",
        "corrupted_requests": "counter",
        "admission_rejections": "counter",
        "time_to_first_token_seconds": FIRST,
        "inter_token_latency_seconds": INTER,
        "request_time_per_output_token_seconds": INTER,
        "e2e_request_latency_seconds": WHOLE,
        "request_queue_time_seconds": WHOLE,
        "request_inference_time_seconds": WHOLE,
        "request_prefill_time_seconds": WHOLE,
        "request_decode_time_seconds": WHOLE,
        "request_prompt_tokens": TOKENS,
        "request_generation_tokens": TOKENS,
        "request_max_num_generation_tokens": TOKENS,
        "request_params_max_tokens": TOKENS,
        "request_prefill_kv_computed_tokens": TOKENS,
        "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
        "request_params_n": "1 2 5 10 20",
        "request_num_preemptions": "1 2 3 4 5 10 20",
    }

    def check(self, which, prefix):
        found = families(which)
        self.assertEqual(set(found), {prefix + name for name in self.NAMES})
        for name, kind in self.NAMES.items():
            family = found[prefix + name]
            self.assertTrue(family.samples, name)
            for sample in family.samples:
                self.assertEqual((sample.labels["model_name"], sample.labels["engine"]), (NAME, "0"), sample)
            if kind in ("gauge", "counter"):
                self.assertEqual(family.type, kind, name)
                continue
            self.assertEqual(family.type, "histogram", name)
            buckets = [(sample.labels["le"], sample.value) for sample in family.samples if sample.name.endswith("_bucket")]
            self.assertEqual([float(le) for le, _ in buckets], [float(le) for le in (kind + " inf").split()], name)
            self.assertEqual(buckets[-1][0], "+Inf", name)
            self.assertEqual([count for _, count in buckets], sorted(count for _, count in buckets), name)
            total = [sample.value for sample in family.samples if sample.name.endswith("_count")]
            self.assertEqual(total, [buckets[-1][1]], name)

    def test_a_prometheus_parser_finds_vllms_names_and_buckets(self):
        server.post("/v1/completions", TEXT)
        self.check(server, "vllm:")

    def test_the_prefix_is_the_flags(self):
        other = Server(BINARY, MODEL, "--metrics-prefix", "kittiwake:")
        try:
            self.check(other, "kittiwake:")
        finally:
            other.kill()

    def test_counters_never_fall_and_gauges_return_to_zero(self):
        server.request("POST", "/reset_prefix_cache")
        last = counters(server)

        def leave(stream):
            with server.open("/v1/completions", {**LONG, "stream": stream}) as connection:
                if stream:
                    connection.recv(100)

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            work = [pool.submit(leave, stream) for stream in (True, False) * 4]
            work += [pool.submit(server.post, "/v1/completions", body) for body in (TEXT, {**TEXT, "prompt": []}) * 6]
            while not all(job.done() for job in work):
                now = counters(server)
                self.assertLessEqual(set(last), set(now), "a series vanished")
                for series, value in last.items():
                    self.assertGreaterEqual(now[series], value, series)
                last = now
        server.wait_idle()
        for name in ("num_requests_waiting_by_reason", "num_requests_running"):
            self.assertEqual({sample.value for sample in families(server)["vllm:" + name].samples}, {0.0})


class Process(unittest.TestCase):
    def test_an_interrupt_drains_too_and_new_clients_are_turned_away(self):
        other = Server(BINARY, MODEL)
        try:
            kept = other.connect()
            kept.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertIn(b" 200 ", kept.recv(1000))
            running = other.open("/v1/completions", {**LONG, "stream": True, "n": 16})
            self.assertEqual(running.recv(15), b"HTTP/1.1 200 OK")
            other.signal(signal.SIGINT)
            other.wait_for(lambda: any("draining" in line for line in other.log), "a drain")
            with kept:
                try:
                    kept.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
                    self.assertEqual(kept.recv(1000), b"", "an idle connection is closed")
                except ConnectionError:
                    pass
            with running, running.makefile("rb") as stream:
                self.assertIn(b"data: [DONE]", stream.read())
            self.assertEqual(other.wait_exit(), 0)
        finally:
            other.kill()

    def test_a_drain_that_takes_too_long_ends_the_streams_with_an_error(self):
        other = Server(BINARY, MODEL, "--shutdown-timeout", "0")
        try:
            with other.open("/v1/completions", {**LONG, "stream": True}) as connection, connection.makefile("rb") as stream:
                self.assertEqual(stream.read(15), b"HTTP/1.1 200 OK")
                other.signal()
                text = stream.read().decode()
            self.assertIn('data: {"error":', text)
            self.assertNotIn("[DONE]", text)
            self.assertEqual(other.wait_exit(), 0)
        finally:
            other.kill()

    def test_more_connections_than_the_system_allows(self):
        other = Server(BINARY, MODEL, max_files=64)
        try:
            running = other.open("/v1/completions", {**LONG, "stream": True, "n": 8})
            self.assertEqual(running.recv(15), b"HTTP/1.1 200 OK")
            crowd = [other.connect() for _ in range(100)]
            with running, running.makefile("rb") as stream:
                self.assertTrue(any(b"data: [DONE]" in line for line in stream), "who is served stays served")
            for connection in crowd:
                connection.close()
            self.assertEqual(other.post("/v1/completions", TEXT)[0], 200)
            self.assertIsNone(other.process.poll())
        finally:
            other.kill()


if __name__ == "__main__":
    unittest.main(verbosity=2)
