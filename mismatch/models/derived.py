"""A checkpoint with its experts in another form, an adapter, or its first layers alone; cached.

What a quantised rollout does to the numbers can only be seen where both forms can be served:

    bf16           a quantised checkpoint, dequantised: exactly the stored values, for any engine;
                   vLLM dequantises MXFP4 while it loads, and needs no copy
    mxfp4          the experts of a gpt-oss in MXFP4, as it is published; engines on GPUs serve it
    mxfp4-rounded  experts rounded to what MXFP4 can hold, still stored in bf16: the numbers of a
                   quantised rollout on machines without kernels for it
    fp8-rounded, int4-rounded, nvfp4-rounded: likewise all matrices of the layers, but for routers

Tensors go through one by one and
shards are closed at 2 GB, so memory stays small whatever the model's size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.facts import SideFacts
from mismatch.models.adapters import adapter_files, with_adapter
from mismatch.models.config import ModelConfig, first_layers, read_config, unpacks_mxfp4
from mismatch.models.digests import RECORD, Derived, record_of, source_hashes
from mismatch.run.hub import INDEX, cached_snapshot, download, weight_places
from mismatch.specs import AS_STORED, ROUNDED_FORMS, Adapter, EngineSpec, TrainSpec, WeightsForm

if TYPE_CHECKING:
    import torch

    from mismatch.models.sizes import SizedModel

SHARD_BYTES = 2 << 30
FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")  # [E, in, out], gpt-oss
SINGLE = re.compile(r"\.experts\.\d+\.\w+\.weight$")  # [out, in], one matrix per expert
PACKED = re.compile(r"(?P<stem>.*\.experts\.\w+)_(?P<half>blocks|scales)$")
HALVES = ("blocks", "scales")  # of MXFP4 experts
ROUTER = re.compile(r"(router|\.gate|shared_expert_gate)\.weight$")
# Where a quantised module keeps its values.
STORED = ("weight", "weight_packed", "qweight")
METHODS = ("fp8", "compressed-tensors", "gptq", "awq")  # that models/quantised.py reads
IN_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?(?:layers|h|blocks))\.(?P<number>\d+)\.")
TOWERS = re.compile("vision|visual|image|audio|encoder")  # stacks that are not the decoder's
Spec = TypeVar("Spec", EngineSpec, TrainSpec)
TRIES = 4
READ: dict[Path, IO[str]] = {}  # derived checkpoints that this process reads, locked


def in_form(spec: Spec, copied: bool = False) -> Spec:
    """Return the spec with its model replaced by one in the form it asks for, made if need be.

    An adapter is merged, but for what applies it itself (``adapter_as`` is "own"). An engine that
    dequantises MXFP4 while it loads gets the packed checkpoint.

    Args:
        copied: files in that form are wanted, whatever the engine can do.

    Raises:
        MismatchError: a model that is not in a local directory or cache, that has no experts in a
            known layout or too few layers, an adapter that does not fit it, or no disk space.
    """
    adapter = None if spec.adapter_as == "own" else spec.adapter
    if spec.weights == AS_STORED and spec.layers is None and adapter is None:
        return spec
    source, form = _local(spec), spec.weights
    here = replace(spec, model=str(source))
    if isinstance(here, EngineSpec) and unpacks_mxfp4(here) and not copied:
        form = AS_STORED  # its first layers are cached packed; the whole is read where it lies
    model = derive(source, form, spec.layers, adapter, exact=spec.dtype == "fp32")
    return replace(spec, model=str(model), revision=None)


def copied_bytes(spec: EngineSpec | TrainSpec, shape: SizedModel) -> int:
    """Return the size of the copy that :func:`in_form` makes; 0: none, or of few layers alone."""
    engine = spec if isinstance(spec, EngineSpec) else EngineSpec()
    merged = spec.adapter is not None and spec.adapter_as != "own"
    as_stored = spec.weights in (AS_STORED, shape.quantised or "bf16") or unpacks_mxfp4(engine)
    if spec.layers is not None or (as_stored and not merged):
        return 0
    return shape.stored_bytes(4 if shape.dtype == "float32" else 2, keeps_packed=as_stored)


def has_copy(spec: EngineSpec | TrainSpec) -> bool:
    """Return whether a copy in that form is cached; it compares hashes of whole checkpoints."""
    here = Path(spec.model).is_dir()
    source = Path(spec.model) if here else cached_snapshot(spec.model, spec.revision)
    paths = [path for path in cache().glob(f"*-{spec.weights}*") if source and _whole(path)]
    hashes = source_hashes(str(source)).items() if paths else {}.items()
    made = filter(None, map(record_of, paths))
    return any(not each.layers and hashes <= each.source_files.items() for each in made)


def free_bytes() -> int:
    """Return what is free on the disk where copies are cached."""
    there = next(path for path in (cache(), *cache().parents) if path.exists())
    return shutil.disk_usage(there).free


@contextmanager
def in_form_while(spec: EngineSpec) -> Iterator[EngineSpec]:
    """As :func:`in_form`; a checkpoint that is made here is deleted behind the block.

    It stays where another process reads it, or where it was there already.
    """
    before = set(cache().glob("*"))
    made = in_form(spec)
    try:
        yield made
    finally:
        target = Path(made.model)
        if is_derived(target) and target not in before:
            READ.pop(target).close()
            with open(target.with_suffix(".read"), "w") as lock, suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(target)


def derive(
    source: Path,
    form: WeightsForm,
    layers: int | None = None,
    adapter: Adapter | None = None,
    exact: bool = False,
) -> Path:
    """Directory of the checkpoint or its first layers in ``form``; the source where it is that.

    Args:
        exact: store what the adapter changes in float32: in a float32 pass the rounding of merged
            weights would look like another function where the engine has the adapter apart.

    Raises:
        MismatchError: as :func:`in_form`.
    """
    held = quantisation(source).get("quant_method", "bf16")
    if form in (AS_STORED, held):
        if layers is None and adapter is None:
            return source
        form = AS_STORED
    else:
        require_form(source, form)
    hashes = source_hashes(str(source))
    what = form if layers is None else f"{form}-{layers}-layers"
    if adapter is not None:
        hashes, what = hashes | adapter_files(adapter.path), f"{what}-adapter{'-fp32' * exact}"
    text = json.dumps([what, sorted(hashes.items())])
    target = cache() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{what}"
    for _ in range(TRIES):  # another process may delete it before this process holds it
        if _whole(target) and _reading(target):
            return target
        with _alone(target):
            if not _whole(target):
                _write(source, target, form, layers, hashes, adapter, exact)
    fault = f"{target} is not whole, however often it is written"
    raise MismatchError(fault, "name another place: MISMATCH_CACHE=DIR")


def _reading(target: Path) -> bool:
    """Hold a derived checkpoint until this process ends; False: it was deleted just before."""
    with suppress(OSError):  # a cache that cannot be written to: nobody deletes from it
        if target not in READ:
            READ[target] = open(target.with_suffix(".read"), "w")  # noqa: SIM115 (of this process)
            fcntl.flock(READ[target], fcntl.LOCK_SH)
    return _whole(target)


def layers_held(directory: Path | None) -> SideFacts:
    """Return ``{"layers": [N, M]}`` of a checkpoint of the first N of M layers; {}: of all."""
    derived = None if directory is None else record_of(directory)
    return {"layers": list(derived.layers)} if derived and derived.layers else {}


def form_name(form: str, directory: Path | None) -> str:
    """Return a form with what it was made of where that tells: "bf16 of fp8".

    No unquantised checkpoint holds these values. MXFP4 is how gpt-oss itself is published.

    Args:
        directory: of a checkpoint, derived or not.
    """
    if form != "bf16" or directory is None or not (directory / "config.json").is_file():
        return form
    derived = record_of(directory)
    method = derived.of if derived else quantisation(directory).get("quant_method")
    return form if method in (None, "mxfp4") else f"{form} of {method}"


def _whole(target: Path) -> bool:
    """Whether a derived checkpoint lies there as it was written: its record names the sizes."""
    try:
        record = record_of(target)
        sizes = record.sizes if record else {}
        return bool(sizes) and all((target / n).stat().st_size == s for n, s in sizes.items())
    except (OSError, MismatchError):
        return False


def require_form(source: Path, form: WeightsForm) -> None:
    """Refuse, before anything is loaded, what cannot be made of a checkpoint.

    Raises:
        MismatchError: no experts in a known layout, MXFP4 asked of another family than gpt-oss, or
            a quantised checkpoint in another form than bf16.
    """
    family, method = read_config(source).get("model_type"), quantisation(source).get("quant_method")
    if method not in (None, "mxfp4") and (form != "bf16" or method not in METHODS):
        fault = f"{source} is quantised ({method}), and has no form {form}"
        raise MismatchError(fault, "give the unquantised checkpoint, or use bf16")
    if method != "mxfp4" and form in (*ROUNDED_FORMS, "bf16"):
        return
    if form == "mxfp4" and family != "gpt_oss":
        fault = f"--weights engine=mxfp4: engines read MXFP4 experts of gpt-oss, not of {family}"
        raise MismatchError(fault, "use mxfp4-rounded: the same values, stored in bf16")
    if not any(p.search(name) for name in _names(source) for p in (FUSED, SINGLE, PACKED)):
        raise MismatchError(
            f"{source} holds no experts in a layout whose MXFP4 form is defined",
            "weights in another form need an MoE checkpoint with one matrix per expert, or gpt-oss",
        )


def is_mxfp4(directory: Path) -> bool:
    """Return whether a checkpoint stores its experts in MXFP4."""
    return quantisation(directory).get("quant_method") == "mxfp4"


def quantisation(directory: Path) -> dict[str, Any]:
    """Return how a checkpoint is quantised, as its config.json says; {}: it is not."""
    config: dict[str, Any] = read_config(directory).get("quantization_config") or {}
    return config


def is_derived(model: str | Path) -> bool:
    """Return whether a checkpoint was made by this module."""
    return Path(model).parent == cache()


def cache() -> Path:
    """Where derived checkpoints are kept: MISMATCH_CACHE, or the user's cache directory."""
    given = os.environ.get("MISMATCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(given) if given else Path(base) / "mismatch") / "weights"


def _local(spec: EngineSpec | TrainSpec) -> Path:
    if Path(spec.model).is_dir():
        return Path(spec.model)
    try:
        return Path(download(spec.model, spec.revision))
    except Exception as error:  # the hub's client raises many kinds
        fault = f"{spec.model} cannot be fetched to change the form of its weights: {error}"
        raise MismatchError(fault, "give a local directory") from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process at a time: ranks and engines may ask for the same checkpoint.

    Half a checkpoint is never left: not on a full disk, nor after Ctrl-C.

    Raises:
        MismatchError: what the cache's disk refuses.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                shutil.rmtree(target.with_suffix(".partial"), ignore_errors=True)
    except OSError as error:
        fault = f"a checkpoint in another form cannot be written to {target.parent}: {error}"
        fix = "free some space, or name another place: MISMATCH_CACHE=DIR"
        raise MismatchError(fault, fix) from error


def _write(
    source: Path,
    target: Path,
    form: WeightsForm,
    layers: int | None,
    hashes: dict[str, str],
    adapter: Adapter | None,
    exact: bool,
) -> None:
    whole = read_config(source)
    config = whole if layers is None else first_layers(whole, layers)
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    if layers is None:  # what a few layers take is small next to the source
        require_space(source, partial)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".bin", INDEX, RECORD)):
            shutil.copyfile(path, partial / path.name)
    shards, tensors = Shards(partial), _converted(source, form, layers)
    for name, tensor in with_adapter(adapter, source, tensors, exact) if adapter else tensors:
        shards.add(name, tensor)
    shards.finish()
    if form != AS_STORED:
        config.pop("quantization_config", None)
    if form == "mxfp4":
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    (partial / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
    held = None if layers is None else (layers, ModelConfig.of(whole).layers)
    record = Derived(form, hashes, sizes, held, quantisation(source).get("quant_method"))
    (partial / RECORD).write_text(json.dumps(to_json(record), indent=2), "utf-8")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _converted(
    source: Path, form: WeightsForm, layers: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, or of its first layers, in its new form, one at a time."""
    import torch

    from mismatch.models import mxfp4
    from mismatch.models.quantised import ROUNDED

    with ExitStack() as stack:
        files = open_tensors(source, stack)
        if layers is not None:
            files = {name: files[name] for name in _first_names(source, files, layers)}
        if form == "bf16" and not is_mxfp4(source):
            yield from _dequantised(quantisation(source), files)
            return
        stored = ((name, file.get_tensor(name)) for name, file in files.items())
        packed = form != AS_STORED and is_mxfp4(source)
        for name, tensor in unpacked(stored, torch.bfloat16) if packed else stored:
            if form in ROUNDED:
                yield name, _rounded(name, tensor, ROUNDED[form])
            elif form == AS_STORED or packed or not (FUSED.search(name) or SINGLE.search(name)):
                yield name, tensor  # MXFP4's own values need no rounding
            elif form == "mxfp4":
                pairs = [mxfp4.quantise(expert.t()) for expert in tensor]
                yield f"{name}_blocks", torch.stack([blocks for blocks, _ in pairs])
                yield f"{name}_scales", torch.stack([scales for _, scales in pairs])
            elif FUSED.search(name):
                yield name, mxfp4.rounded(tensor)
            else:
                yield name, mxfp4.rounded(tensor.t()[None])[0].t().contiguous()


def unpacked_names(names: Iterable[str]) -> list[str]:
    """Return names of a checkpoint's tensors as they are once its experts are dequantised.

    >>> unpacked_names(["a.experts.up_blocks", "a.experts.up_scales", "a.experts.up_bias"])
    ['a.experts.up', 'a.experts.up_bias']
    """
    kept = (PACKED.sub(r"\g<stem>", name) for name in names)
    return list(dict.fromkeys(kept))


def unpacked(
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, blocks and scales of experts as one tensor [E, in, out].

    The two halves may come far apart, in any order: files of a checkpoint are cut by size. The
    first waits packed, and where it was read; nothing dequantised is kept.

    Args:
        device: where experts are dequantised; None: where their blocks are.

    Raises:
        MismatchError: at the end, a half whose other half never came.
    """
    from mismatch.models.mxfp4 import dequantise

    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        match = PACKED.match(name)
        if match is None:
            yield name, tensor
            continue
        stem, waiting[name] = match["stem"], tensor
        blocks, scales = (waiting.get(f"{stem}_{half}") for half in HALVES)
        if blocks is not None and scales is not None:
            for half in HALVES:
                del waiting[f"{stem}_{half}"]
            place = device or blocks.device
            yield stem, dequantise(blocks.to(place), scales.to(place), dtype)
    for name in waiting:
        stem, _, half = name.rpartition("_")
        other = f"{stem}_{HALVES[half == HALVES[0]]}"
        fault = f"the checkpoint holds no {other}, the other half of the MXFP4 in {name}"
        raise MismatchError(fault, "fetch the checkpoint again")


def _rounded(
    name: str, tensor: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a matrix of a layer rounded, and everything else as it is."""
    if FUSED.search(name) and tensor.ndim == 3:  # [E, in, out]
        return rounded(tensor.mT).mT.contiguous()
    matrix = name.endswith(".weight") and tensor.ndim == 2 and IN_LAYER.match(name)
    return rounded(tensor) if matrix and not ROUTER.search(name) else tensor


def _dequantised(
    config: dict[str, Any], files: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a quantised checkpoint, and of a quantised module its matrix alone."""
    from mismatch.models.quantised import PARTS, dequantise

    modules = {name.rpartition(".")[0] for name in files if name.rpartition(".")[2] in PARTS}
    for name, file in files.items():
        module, _, part = name.rpartition(".")
        if module not in modules or part not in {*PARTS, "weight"}:
            yield name, file.get_tensor(name)
        elif part in STORED:
            held = {each: f"{module}.{each}" for each in {*PARTS, "weight"}}
            parts = {k: files[v].get_tensor(v) for k, v in held.items() if v in files}
            yield f"{module}.weight", dequantise(parts, config)


def _first_names(source: Path, held: Collection[str], layers: int) -> list[str]:
    """Return names of a checkpoint's tensors, but for those of later layers of its decoder."""
    listed, whole = weight_places(source) or held, ModelConfig.of(read_config(source)).layers
    matches = [match for name in listed if (match := IN_LAYER.match(name))]
    # Layers of multi-token prediction follow the last one, or are another, short stack.
    last = {match["stack"] for match in matches if int(match["number"]) == whole - 1}
    decoders = [stack for stack in sorted(last) if not TOWERS.search(stack)]
    if len(decoders) != 1:
        fault = f"--layers: {source} has {' and '.join(decoders) or 'none'} for a layer {whole - 1}"
        raise MismatchError(fault, "drop --layers; weights are read from safetensors alone")
    later = {m.string for m in matches if m["stack"] in decoders and int(m["number"]) >= layers}
    kept = [name for name in listed if name not in later]
    if missing := [name for name in kept if name not in held]:
        fault = f"{source} lacks {len(missing)} tensors of its index, e.g. {missing[0]}"
        raise MismatchError(fault, "fetch the checkpoint again")
    return kept


class Shards:
    """Writes tensors to safetensors files of bounded size, and their index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pending: dict[str, torch.Tensor] = {}
        self.bytes = self.total = self.count = 0
        self.places: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.bytes + size > SHARD_BYTES:
            self._flush()
        self.pending[name] = tensor.contiguous()
        self.bytes += size
        self.total += size

    def finish(self) -> None:
        self._flush()
        index = {"metadata": {"total_size": self.total}, "weight_map": self.places}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2), "utf-8")

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.count += 1
        file = f"model-{self.count:05d}.safetensors"
        try:
            save_file(self.pending, self.directory / file, {"format": "pt"})
        except SafetensorError as error:  # safetensors' error for a full disk
            raise OSError(str(error)) from error
        self.places |= dict.fromkeys(self.pending, file)
        self.pending, self.bytes = {}, 0


def first_not_finite(source: Path) -> str:
    """Return the name of a checkpoint's tensor that holds NaN or infinity; "": none does."""
    with ExitStack() as stack:
        for name, file in open_tensors(source, stack).items():
            if not file.get_tensor(name).float().isfinite().all():
                return name
    return ""


def open_tensors(source: Path, stack: ExitStack) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    files: dict[str, Any] = {}
    for path in sorted(source.glob("*.safetensors")):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            fault = f"{path} cannot be read: {error}"
            raise MismatchError(fault, "fetch the checkpoint again") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _names(source: Path) -> list[str]:
    with ExitStack() as stack:
        return list(open_tensors(source, stack))


def require_space(source: Path, target: Path) -> None:
    """Dequantising multiplies MXFP4 by four at most; anything else keeps its size."""
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    needed = size * (4 if is_mxfp4(source) else 1)
    free = shutil.disk_usage(target).free
    if free < needed:
        raise MismatchError(
            f"the checkpoint in its other form needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB "
            f"are free at {target.parent}",
            "free some, or name another place: MISMATCH_CACHE=DIR",
        )
