"""How much memory an engine takes for K/V and states: as told, or enough for its requests within
what is free."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from headstart.assembly.build import Built
from headstart.assembly.host import available_bytes
from headstart.engine.options import MAX_DRAFTS, EngineOptions
from headstart.errors import EngineError
from headstart.models.attention import MAX_GATHERED_SLOTS
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.mla_config import MOST_UNFOLDED

_GPU_SHARE = 0.5
# On a CPU memory is everybody's: enough for requests of usual length, and not more than this
# unless one request of full length needs it or the user asks.
_USUAL_TOKENS = 2048
_CPU_BYTES = 1 << 30
_MOST_OF_FREE = 0.8
# Of memory that recurrent states share with K/V; those that are not needed are snapshots.
_STATE_SHARE = 0.5
_USUAL_DRAFTS = 4
# One request of so many is expected not to sit where kernels run, and to need slots for its drafts.
_STANDING_PART = 4


@dataclass(frozen=True)
class Memory:
    """What an engine's requests share, and the bytes of one of each."""

    num_blocks: int
    block_bytes: int
    num_states: int = 0  # slots of recurrent states; each holds all layers'
    state_bytes: int = 0
    ring_bytes: int = 0  # of all seats: what recurrent layers keep of the newest rows


def plan_memory(built: Built, options: EngineOptions, *, fused: bool = False) -> Memory:
    """How many K/V blocks and states there is memory for, with what seats need taken off."""
    state = state_bytes(built)
    if state == 0:
        return Memory(*num_blocks(built, options))
    rings = ring_bytes(built, options) if fused else 0
    given = _given(built, options)
    whole = int(_free_bytes(built.device) * _MOST_OF_FREE) if given is None else given
    if rings >= whole:
        raise EngineError(
            f"the rings of {options.max_running_requests} seats need {rings:,} bytes and there "
            f"are {whole:,}. Lower max_running_requests or speculate, or raise kv_bytes or "
            "memory_fraction."
        )
    left = whole - rings
    room = min(max(_CPU_BYTES, 2 * state), left / 2) if given is None else left * _STATE_SHARE
    states = min(int(room // state), _most_states(built, options, fused=fused))
    if states < 1:
        raise EngineError(
            f"the state of one request needs {state:,} bytes and there are {int(room):,}. Raise "
            "kv_bytes or memory_fraction."
        )
    taken = states * state + rings
    return Memory(*num_blocks(built, options, taken=taken), states, state, rings)


def _most_states(built: Built, options: EngineOptions, *, fused: bool) -> int:
    """One for everybody who runs, for a prefix each, and for every draft that may be rejected.

    Those who sit need none for drafts: their way back is in the rings.
    """
    running = options.max_running_requests
    drafts = 0 if built.head is None else _drafts(options)
    return 2 * running + drafts * (-(-running // _STANDING_PART) if fused else running)


def seat_drafts(built: Built, options: EngineOptions) -> int:
    """The most drafts of a request that sits; who asks for more is carried on by the host.

    Without recurrent layers a seat has room for all that a request may ask for. Rings grow with
    that number, so they are made for what the engine does by itself.
    """
    if built.head is None:
        return 0
    return MAX_DRAFTS if built.config.delta is None else options.max_drafts


def ring_bytes(built: Built, options: EngineOptions) -> int:
    """What the seats of a model with recurrent layers take, where kernels run."""
    from headstart.backends.cuda.recurrent import RecurrentSeats

    config = built.config
    if config.delta is None:
        return 0
    return RecurrentSeats.create(
        config.delta, config.num_recurrent, options.max_running_requests,
        seat_drafts(built, options), built.dtype, torch.device("meta"),
    ).num_bytes  # fmt: skip


def _drafts(options: EngineOptions) -> int:
    return _USUAL_DRAFTS if options.speculate == "auto" else int(options.speculate)


def state_bytes(built: Built) -> int:
    """One request's states in every recurrent layer; 0 where a model has none."""
    delta, wide = built.config.delta, max(built.dtype.itemsize, 4)
    if delta is None:
        return 0
    layer = delta.conv_values * built.dtype.itemsize + delta.memory_values * wide
    return built.config.num_recurrent * layer


def num_blocks(built: Built, options: EngineOptions, *, taken: int = 0) -> tuple[int, int]:
    """How many K/V blocks there is memory for, and the bytes of one; others have `taken`."""
    block = block_bytes(built, options.block_size)
    # A request keeps a slot for the token that its last row gives. More than all requests at full
    # length could ever hold is of no use.
    full = -(-(built.max_len + 1) // options.block_size)
    most = options.max_running_requests * full
    budget = _budget(built, options, block, full, taken)
    # Nothing attends in a trunk of recurrent layers without a head: blocks are mere numbers there.
    count = min(budget // block if block else most, most)
    if count < 1:
        raise EngineError(
            f"one K/V block needs {block:,} bytes and there are {budget:,}. Raise kv_bytes or "
            "memory_fraction, or lower block_size."
        )
    return int(count), block


def block_bytes(built: Built, block_size: int) -> int:
    """K/V of a block in every layer of trunk and head, and the states kept beside it."""
    config = built.config
    token = sum(slot_values(config, kind) for kind in config.layers)
    states = 0
    if built.head is not None:
        own = built.head.config
        token += built.head.num_modules * slot_values(own, own.head_layer)
        states = built.head.num_modules * built.config.hidden
    return (token * block_size + states) * built.dtype.itemsize


def slot_values(config: ModelConfig, kind: LayerKind) -> int:
    """Numbers that a layer keeps of a token; a recurrent one none."""
    return 0 if kind.mixer == "delta" else sum(prod(shape) for shape in config.kept(kind))


def prompt_bytes(built: Built) -> int:
    """What a library that attends for long prompts may take beside the pass itself, on a GPU.

    What is kept of one context, gathered, and once more where it is filled up; or what latents
    are unfolded to, for which no library is asked.
    """
    config, mla = built.config, built.config.mla
    attending = [kind for kind in config.layers if kind.mixer != "delta"]
    widest = max((slot_values(config, kind) for kind in attending), default=0)
    gathered = min(built.max_len, MAX_GATHERED_SLOTS) * widest
    filled = gathered
    if mla is not None:
        whole = built.max_len * config.num_heads * (mla.nope_dim + mla.v_dim)
        filled = min(MOST_UNFOLDED, whole)
    return (gathered + filled) * built.dtype.itemsize


def _given(built: Built, options: EngineOptions) -> int | None:
    """Bytes for everything that requests need, if that is decided; None if it goes by use."""
    if options.kv_bytes is not None:
        return options.kv_bytes
    share = options.memory_fraction
    if share is None and built.device.type != "cpu":
        share = _GPU_SHARE
    if share is None:
        return None
    may_gather = built.device.type == "cuda" and options.kernels != "off" and not options.exact
    taken = prompt_bytes(built) if may_gather else 0
    return int(max(0, _free_bytes(built.device) - taken) * share)


def _budget(built: Built, options: EngineOptions, block: int, full: int, taken: int) -> int:
    given = _given(built, options)
    if given is not None:
        return given - taken
    free = _free_bytes(built.device) - taken
    usual = min(full, -(-_USUAL_TOKENS // options.block_size)) * options.max_running_requests
    wanted = max(min(usual * block, _CPU_BYTES), full * block)
    return min(wanted, int(free * _MOST_OF_FREE))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
