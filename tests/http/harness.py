"""Starts a real `kittiwake serve` and talks to it below the official client's level: raw sockets, /metrics, signals."""

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time

# Long enough for a loaded machine; nothing is measured against it.
PATIENCE_S = 120
NAME = "org/tiny"


class Server:
    """One server process on a free port."""

    def __init__(self, binary, model, *flags, max_files=None):
        command = [binary, "serve", model, "--port", "0", "--served-model-name", NAME, "tiny", "--threads", "1"]
        # Small on purpose, so that requests queue and a long body is quick to make.
        command += ["--max-num-seqs", "8", "--max-num-queued-reqs", "256", "--max-body-bytes", "65536", "--enable-admin", *flags]
        limit = max_files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files)))
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=limit)
        self.log = []
        self.address = None
        ready = threading.Event()
        self.reader = threading.Thread(target=self._read_log, args=(ready,), daemon=True)
        self.reader.start()
        if not ready.wait(PATIENCE_S) or self.address is None:
            self.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))

    def _read_log(self, ready):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"listening on http://([\d.]+):(\d+)", line)
            if found and self.address is None:
                self.address = (found[1], int(found[2]))
                ready.set()
        ready.set()

    @property
    def base_url(self):
        return "http://%s:%d/v1" % self.address

    def connect(self):
        return socket.create_connection(self.address, timeout=PATIENCE_S)

    def request(self, method, path, body=None, headers=None):
        """Status, headers and body text of one request."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        try:
            headers = {"Content-Type": "application/json", **(headers or {})}
            if isinstance(body, (dict, list)):
                body = json.dumps(body)
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()
        finally:
            connection.close()

    def post(self, path, body, **headers):
        status, _, text = self.request("POST", path, body, headers)
        return status, json.loads(text)

    def open(self, path, body):
        """A socket with the request sent and nothing read."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + data)
        return connection

    def metric(self, name, **labels):
        """The value of one series; None when there is no such series."""
        _, _, text = self.request("GET", "/metrics")
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            bare, _, rest = series.partition("{")
            if bare == name and all(f'{key}="{wanted}"' in rest for key, wanted in labels.items()):
                return float(value)
        return None

    def wait_for(self, condition, what):
        end = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"never happened: {what}")
            time.sleep(0.002)

    def wait_idle(self):
        """Nothing runs, nothing waits, every block is back."""
        names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
        self.wait_for(lambda: all(self.metric(f"vllm:{name}") == 0 for name in names), "an idle engine")

    def signal(self, number=signal.SIGTERM):
        os.kill(self.process.pid, number)

    def wait_exit(self):
        code = self.process.wait(PATIENCE_S)
        self.reader.join(PATIENCE_S)
        return code

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()
