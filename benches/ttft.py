"""Time to ready, and time to first token of a 1,500-token prefix, cold and from the prefix cache, through HTTP.

    cargo build --release && python3 benches/ttft.py [BINARY] [ROUNDS]

Prints medians: seconds from process start to a healthy server; TTFT of a new prefix with a 16-token tail (cold), of the
same prefix with another tail (warm), their ratio, and the warm TTFT in decode steps at that depth.
"""

import http.client
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "target/release/kittiwake")
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 5
PORT = 8123


def start():
    """The server process and the seconds until it was healthy."""
    begin = time.perf_counter()
    process = subprocess.Popen([BINARY, "serve", "demo", "--port", str(PORT), "--log-level", "error"], cwd=ROOT)
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, time.perf_counter() - begin
        except OSError:
            time.sleep(0.005)
    sys.exit("the server ended before it was ready")


def stop(process):
    process.terminate()
    process.wait()


def stream(prompt, num_tokens):
    """Seconds to the first token, and seconds per token after it."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    times = [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]
    return times[0] - begin, (times[-1] - times[0]) / max(len(times) - 1, 1)


ready = []
for _ in range(ROUNDS):
    process, seconds = start()
    ready.append(seconds)
    stop(process)
process, _ = start()
cold, warm, step = [], [], []
for index in range(ROUNDS):
    ids = lambda seed, count: random.Random(seed).choices(range(100, 40000), k=count)
    prefix = ids(index, 1500)
    cold.append(stream(prefix + ids(1000 + index, 16), 1)[0])
    warm.append(stream(prefix + ids(2000 + index, 16), 1)[0])
    step.append(stream(prefix + ids(3000 + index, 16), 33)[1])
stop(process)
print(json.dumps({
    "ready_s": round(statistics.median(ready), 3),
    "ttft_cold_s": round(statistics.median(cold), 4),
    "ttft_warm_s": round(statistics.median(warm), 4),
    "warm_over_cold": round(statistics.median(w / c for w, c in zip(warm, cold)), 4),
    "warm_in_decode_steps": round(statistics.median(w / s for w, s in zip(warm, step)), 2),
}))
