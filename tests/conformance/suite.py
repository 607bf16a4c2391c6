"""The common tests of transformers: in its source distribution, which is fetched once, checked, and kept in a cache."""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

VERSION = "5.24.0"
SHA256 = "906cb8c3cb2123575e263962586a4d21a979ce97feeb95fe6aaf66fe6ae88bf3"
CACHE_VARIABLE = "TRIPTYCH_CONFORMANCE_CACHE"


class SuiteUnavailable(Exception):
    """The source distribution cannot be had here and now."""


def suite_folder() -> Path:
    """The folder of the suite's own files, from the cache or else from the package index that pip is set up with.

    Raises:
        SuiteUnavailable: pip cannot download it.
        ValueError: what pip downloaded is not the pinned archive, or is for another transformers than the installed.
    """
    if transformers.__version__.split(".")[:2] != VERSION.split(".")[:2]:
        raise ValueError(f"The suite is that of transformers {VERSION}, but {transformers.__version__} is installed.")
    root = Path(__file__).parents[2]
    cache = Path(os.environ.get(CACHE_VARIABLE) or root / ".cache" / "conformance")
    folder = cache / f"transformers-{VERSION}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            tests = extract(download(Path(scratch)))
            try:
                tests.rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def download(scratch: Path) -> Path:
    """The archive. Its hash stands in the requirement, so pip refuses any other before it opens it."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"transformers=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", "transformers", "--dest", str(scratch), "-r", str(requirements)]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", *options],
        capture_output=True,
        text=True,
    )
    archive = scratch / f"transformers-{VERSION}.tar.gz"
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        raise ValueError(f"pip downloaded something else than the pinned archive: {pip.stderr.strip()}")
    if pip.returncode or not archive.is_file():
        last_line = (pip.stderr.strip().splitlines() or [f"exit code {pip.returncode}"])[-1]
        raise SuiteUnavailable(f"pip cannot download the source distribution of transformers {VERSION}: {last_line}")
    return archive


def extract(archive: Path) -> Path:
    """The archive's folder of tests, beside it."""
    prefix = f"transformers-{VERSION}/tests/"
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if member.isfile() and member.name.startswith(prefix)]
        tar.extractall(archive.parent, members=members, filter="data")
    tests = archive.parent / prefix
    (tests / "__init__.py").touch()  # the suite imports its own folder
    return tests
