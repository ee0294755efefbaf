"""Build of the images with buildah: `make images`.

First writes the context, `build/images`: wheel, the parts of the lock, jars, bills of materials. Any other builder
takes the same context: `docker build -f deploy/packaging/images/Containerfile --target bridge build/images`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.deploy.packaging.dist import build_wheel
from kiln.deploy.packaging.images.packages import IMAGES, Image, build_lock, list_packages
from kiln.deploy.packaging.sbom import build_bill
from kiln.deploy.stack import jars
from kiln.deploy.stack.jars import PROJECT

CONTAINERFILE: Final = Path(__file__).with_name("Containerfile")
CONTEXT: Final = PROJECT / "build" / "images"
BASE: Final = "localhost/kiln-base:12"
_SUITE: Final = "bookworm"
_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_SLIM: Final = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")


class ImageError(KilnError):
    """An image cannot be built."""


class NoBuilderError(PrerequisiteError):
    """A program for the build of images is not installed."""


def write_context(folder: Path, images: Sequence[Image] = IMAGES) -> None:
    """Write the build context to a folder, and replace an older one.

    Raises:
        KilnError: A part of the context cannot be built.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_wheel(folder / "wheel")
    for other in (folder / "wheel").glob("*.tar.gz"):
        other.unlink()
    shutil.copyfile(PROJECT / "conf" / "uv.lock", folder / "uv.lock")
    for image in images:
        (folder / f"{image}.lock").write_text(build_lock(image), encoding="utf-8")
        (folder / f"{image}.cdx.json").write_text(
            build_bill(list_packages(image), jars=image == "jobs"), encoding="utf-8"
        )
    shutil.copyfile(CONTAINERFILE.with_name("entrypoint.sh"), folder / "entrypoint.sh")
    if "jobs" in images:
        _copy_jars(folder / "jars")


def build_images(images: Sequence[Image], tag: str, base: str) -> None:
    """Build images named `localhost/kiln-IMAGE:TAG` from the context, and print their sizes.

    Raises:
        ImageError: The build fails.
    """
    if base == BASE:
        build_base()
    arguments = ["buildah", "build", "--isolation", "chroot", "--layers", "--file", str(CONTAINERFILE)]
    arguments += ["--build-arg", f"BASE={base}"]
    if _CERTIFICATES.is_file():  # those of the machine: its repositories may be mirrors with authorities of their own
        arguments += ["--volume", f"{_CERTIFICATES}:/run/certificates.crt:ro"]
        arguments += ["--build-arg", "SSL_CERT_FILE=/run/certificates.crt"]
    for image in images:
        name = f"localhost/kiln-{image}:{tag}"
        _run(*arguments, "--target", image, "--tag", name, str(CONTEXT))
        print(f"{name}  {_run('buildah', 'images', '--format', '{{.Size}}', name, quiet=True).strip()}")


def build_base() -> None:
    """Build the base image from Debian packages, unless it exists.

    Raises:
        ImageError: The build fails.
    """
    if _run("buildah", "images", "--quiet", "--filter", f"reference={BASE}", quiet=True).strip():
        return
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        tar = Path(scratch) / "base.tar"
        slim = [f"--dpkgopt=path-exclude={pattern}" for pattern in _SLIM]
        keep = ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
        _run("mmdebstrap", "--quiet", "--variant=minbase", *slim, *keep, _SUITE, str(tar))
        container = _run("buildah", "from", "scratch", quiet=True).strip()
        _run("buildah", "add", "--quiet", container, str(tar), "/", quiet=True)
        _run("buildah", "config", "--cmd", "/bin/bash", container)
        _run("buildah", "commit", "--quiet", "--rm", container, BASE, quiet=True)


def _copy_jars(folder: Path) -> None:
    root = jars.ensure_jars()
    jars.verify_checksums(root)
    for conf, names in jars.read_pinned_jars(jars.IVY_XML.read_bytes()).items():
        (folder / conf).mkdir(parents=True)
        for name in names:
            shutil.copyfile(root / conf / name, folder / conf / name)
    shutil.copyfile(root / jars.STAMP, folder / jars.STAMP)


def _run(*arguments: str, quiet: bool = False) -> str:
    """Run a program, and return its output if `quiet`; its errors go to the stderr of this process."""
    if shutil.which(arguments[0]) is None:
        raise NoBuilderError(f"{arguments[0]} is not installed. On Debian: apt-get install buildah mmdebstrap")
    done = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
        env={**os.environ, "BUILDAH_FORMAT": "oci"},
    )
    if done.returncode:
        raise ImageError(f"{' '.join(arguments[:2])} ended with {done.returncode}; its last lines say why")
    return done.stdout or ""


def main() -> int:
    """`python -m kiln.deploy.packaging.images.build [IMAGE…]`."""
    parser = argparse.ArgumentParser(prog="make images ARGS=…", description="Build the images of Kiln with buildah.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"{' or '.join(IMAGES)}; default: both")
    parser.add_argument("--tag", default="latest", help="default: latest")
    parser.add_argument("--base", default=BASE, help="a Debian 12 to build on, by its digest; default: one made here")
    parser.add_argument("--context-only", action="store_true", help=f"write {CONTEXT.relative_to(PROJECT)} and stop")
    given = parser.parse_args()
    images = [image for image in IMAGES if image in given.images or not given.images]
    if unknown := set(given.images) - set(IMAGES):
        parser.error(f"there is no image {', '.join(sorted(unknown))}; there are {', '.join(IMAGES)}")
    try:
        write_context(CONTEXT, images)
        if not given.context_only:
            build_images(images, given.tag, given.base)
    except KilnError as error:
        print(f"make images: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
