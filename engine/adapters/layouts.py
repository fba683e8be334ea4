"""Adapter layouts: the formats in which trainers write LoRA, and their detection.

Canonical is the form of `revision.py`, with one entry an expert and projection, such as
`model.layers.0.mlp.experts.3.up_proj.lora_A` (R, I). A layout differs only in how it writes the routed
experts; attention, dense MLPs and shared experts are two matrices a module in all of them. The layout of a
file is detected from tensor names and shapes; `layout_tensors.py` converts the values.

Shapes: E experts, R rank, I input features, O output features.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.adapters.foreign_names import reason_of
from engine.adapters.revision import PEFT_PREFIX
from engine.base.attention import Size
from engine.base.families import EXPERT, BaseShapes
from engine.errors import AdapterError

Shape = tuple[int, ...]
ENDS = "its name must end in .lora_A or .lora_B"
# A state dict that was saved without peft names the adapter: `lora_A.default.weight`.
NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?!(?:weight|bias)$)(?P<adapter>[\w-]+))?(?:\.weight)?"
)


@dataclass(frozen=True)
class ExpertLayout:
    """How one layout writes the experts of a layer.

    `names` maps a projection to what follows `...experts` in a tensor's name. `a_axes` and `b_axes` are
    the axes of its tensors, slowest first; a pair such as `ER` is one axis of E * R. With `broadcast`
    an axis of experts may have the size 1.
    """

    name: str
    names: Mapping[str, str]
    a_axes: tuple[str, ...]
    b_axes: tuple[str, ...]
    broadcast: bool = False

    def axes(self, side: str) -> tuple[str, ...]:
        """Return the axes of side A's or B's tensors, slowest first."""
        return self.a_axes if side == "A" else self.b_axes


FUSED = {"gate_up_proj": ".base_layer", "down_proj": ""}
PACKED = {"gate_up_proj": ".gate_up_proj", "down_proj": ".down_proj"}
SPLIT = {"gate_proj": ".w1", "up_proj": ".w3", "down_proj": ".w2"}
# Two matrices an expert and projection: what peft wrote while experts were linear modules.
PER_EXPERT = ExpertLayout("per-expert", {}, ("R", "I"), ("O", "R"))
LAYOUTS = (
    PER_EXPERT,
    # peft's target_parameters: down_proj is wrapped around gate_up_proj and owns the bare name. By peft
    # 0.21's ParamWrapper.get_delta_weight A's rows are expert-major, B's columns are rank-major.
    ExpertLayout("peft-fused", FUSED, ("ER", "I"), ("O", "RE")),
    # Megatron-Bridge for engines whose experts are one parameter: peft's names and order of elements with the
    # axes apart (pull request 5939, stack_3d_moe).
    ExpertLayout("megatron-stacked", FUSED, ("E", "R", "I"), ("O", "R", "E")),
    # Megatron-Bridge by default: one tensor a layer and projection, experts first. Pull request 6075 pins
    # (E, r, in) and (E, out, r) under the packed names.
    ExpertLayout("megatron-3d", PACKED, ("E", "R", "I"), ("E", "O", "R")),
    # The factor next to the hidden state is one for all experts: by sglang's pull request 21466 gate_up's A
    # and down's B have an expert axis of 1.
    ExpertLayout("shared-outer", PACKED, ("E", "R", "I"), ("E", "O", "R"), broadcast=True),
    # The same with gate and up apart: enable_moe_shared_loras in vllm/lora/utils.py names the stacks
    # experts.w1, w2 and w3.
    ExpertLayout("shared-outer-split", SPLIT, ("E", "R", "I"), ("E", "O", "R"), broadcast=True),
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}
# Layouts in which the bare name of the experts is that of a projection.
BARE = tuple(layout.name for layout in LAYOUTS if "" in layout.names.values())
PLAIN = "plain"


@dataclass(frozen=True)
class Factor:
    """Where one tensor of a file belongs. `number` is the expert of a per-expert tensor.

    `module` is our path of what it belongs to, `given` the one by which its `rank_pattern` would speak of
    it, `parent` the path up to `experts`; `projection` is empty outside the routed experts.
    """

    name: str
    side: str
    module: str
    given: str
    parent: str = ""
    projection: str = ""
    number: int | None = None


@dataclass(frozen=True)
class Detected:
    """A file's layout by its names and shapes and, for each module, A, B and the rank."""

    layout: str
    pairs: Mapping[str, tuple[Factor, Factor]]
    ranks: Mapping[str, int]


def detect(shapes: Mapping[str, Shape], base: BaseShapes) -> Detected:
    """Find the layout of tensors by their names and shapes, and check that every one fits the base.

    Raises `AdapterError` that names the tensor, with its shape and the one that is needed.
    """
    if not shapes:
        raise AdapterError("The adapter holds no tensors, so it would serve the base itself.")
    _refuse_several(shapes)
    placed = [_place(name, shape, base) for name, shape in shapes.items()]
    routed = [(layout, factor) for layout, factor in placed if layout]
    layout = _one_layout(routed)
    wrapped = {factor.parent for _, factor in routed if ".base_layer." in factor.name}
    pairs: dict[str, dict[str, Factor]] = {}
    for _, factor in placed:
        owner = _owner(factor, shapes, wrapped, base) if layout in BARE else factor
        sides = pairs.setdefault(owner.module, {})
        if owner.side in sides:
            raise AdapterError(f"The tensors {sides[owner.side].name} and {owner.name} are the same factor.")
        sides[owner.side] = owner
    ranks = {module: _check_pair(layout, sides, shapes, base) for module, sides in pairs.items()}
    whole = {module: (sides["A"], sides["B"]) for module, sides in pairs.items()}
    return Detected(_refine(layout, routed, shapes, base), whole, ranks)


def peft_name(name: str) -> str:
    """Return the name that peft gives a factor, without the name of an adapter in it."""
    match = NAME.fullmatch(name)
    assert match
    return f"{PEFT_PREFIX}{match['module'].removeprefix(PEFT_PREFIX)}.lora_{match['side']}.weight"


def _refuse_several(names: Iterable[str]) -> None:
    matches = (NAME.fullmatch(name) for name in names)
    adapters = sorted({match["adapter"] or "" for match in matches if match})
    if len(adapters) > 1:
        shown = ", ".join(repr(name[:80]) for name in adapters[:3])
        raise AdapterError(
            f"The tensors' names hold several adapters: {shown}. Save one with "
            "`save_pretrained(..., selected_adapters=[NAME])`."
        )


def _place(name: str, shape: Shape, base: BaseShapes) -> tuple[str, Factor]:
    """Return the layout that a tensor is of, empty outside the routed experts, and where it belongs."""
    match = NAME.fullmatch(name)
    if match is None:
        raise AdapterError(f"The tensor {name[:200]!r} is not a LoRA factor: {reason_of(name) or ENDS}.")
    given, side = match["module"].removeprefix(PEFT_PREFIX), match["side"]
    module = base.canonical_name(given)
    if module in base.linear:
        return "", Factor(name, side, module, given)
    expert = EXPERT.fullmatch(module)
    if expert and expert["parent"] in base.experts and expert["projection"] in SPLIT:
        parent, number = expert["parent"], int(expert["number"])
        if number < base.experts[parent].count:
            return PER_EXPERT.name, Factor(name, side, module, given, parent, expert["projection"], number)
    # Renamed parts such as w1 are stack names too, so a stack is looked up as the file has it.
    parent, separator, rest = given.rpartition(".experts")
    parent = base.canonical_name(parent + separator)
    for layout in LAYOUTS[1:]:
        if parent in base.experts and rest in layout.names.values() and len(shape) == len(layout.axes(side)):
            projection = next(key for key, value in layout.names.items() if value == rest)
            path = f"{parent}.{projection}"
            return layout.name, Factor(name, side, path, path, parent, projection)
    if parent in base.experts and any(rest in layout.names.values() for layout in LAYOUTS):
        raise AdapterError(
            f"The tensor {name} has the shape {shape}; experts never have {len(shape)} axes under that name."
        )
    reason = reason_of(name)
    raise AdapterError(
        f"The tensor {name} is for the module {given}, which the base does not have{reason and ': '}{reason}."
    )


def _one_layout(routed: Iterable[tuple[str, Factor]]) -> str:
    first: dict[str, Factor] = {}
    for layout, factor in routed:
        first.setdefault(layout, factor)
    for (one, left), (other, right) in pairwise(first.items()):
        raise AdapterError(f"The adapter mixes layouts: {left.name} is {one}, {right.name} is {other}.")
    return next(iter(first), PLAIN)


def _check_pair(layout: str, sides: dict[str, Factor], shapes: Mapping[str, Shape], base: BaseShapes) -> int:
    for here, there in (("A", "B"), ("B", "A")):
        if here not in sides:
            factor = sides[there]
            missing = f"lora_{here}".join(factor.name.rsplit(f"lora_{there}", 1))
            raise AdapterError(f"The adapter has the tensor {factor.name} but not its other half {missing}.")
    factor = sides["A"]
    rank = _rank(layout, factor, shapes[factor.name], base)
    for side in "AB":
        name = sides[side].name
        expected = expected_shapes(layout, factor, side, rank, base)
        if shapes[name] not in expected:
            wanted = " or ".join(map(str, expected)).replace("-1", "rank")
            raise AdapterError(f"The tensor {name} has the shape {shapes[name]}; the base needs {wanted}.")
    return rank


def _owner(factor: Factor, shapes: Mapping[str, Shape], wrapped: set[str], base: BaseShapes) -> Factor:
    """Give a bare tensor its projection: peft uses that name for gate_up where down_proj has no LoRA."""
    if factor.projection != "down_proj" or factor.parent in wrapped:
        return factor
    name_A, name_B = (re.sub("lora_[AB]", side, factor.name) for side in ("lora_A", "lora_B"))
    ends = (shapes.get(name_A, (0,))[-1], shapes.get(name_B, (0,))[0])
    if ends != base.experts[factor.parent].size("gate_up_proj"):
        return factor
    path = f"{factor.parent}.gate_up_proj"
    return replace(factor, module=path, given=path, projection="gate_up_proj")


def _size(factor: Factor, base: BaseShapes) -> Size:
    experts = base.experts.get(factor.parent)
    return experts.size(factor.projection) if experts else base.linear[factor.module]


def _form(layout: str, factor: Factor) -> ExpertLayout:
    return BY_NAME[layout] if factor.projection and factor.number is None else PER_EXPERT


def _rank(layout: str, factor: Factor, shape: Shape, base: BaseShapes) -> int:
    """Return the rank in the shape of A; -1 when the shape has none, which fits nothing."""
    axes = _form(layout, factor).a_axes
    if len(shape) != len(axes):
        return -1
    (rows,) = (size for axis, size in zip(axes, shape, strict=True) if "R" in axis)
    experts = base.experts[factor.parent].count if "ER" in axes else 1
    return rows // experts if rows and rows % experts == 0 else -1


def expected_shapes(layout: str, factor: Factor, side: str, rank: int, base: BaseShapes) -> list[Shape]:
    """Return the shapes that a factor of this rank may have; two where an expert axis may be 1."""
    form = _form(layout, factor)
    size_in, size_out = _size(factor, base)
    count = base.experts[factor.parent].count if factor.parent in base.experts else 1
    # Until the whole file is read, Megatron's default and shared-outer look the same.
    may_share = form.broadcast or form.name == "megatron-3d"
    sizes = []
    for experts in (count, 1) if may_share else (count,):
        flat = experts * rank if rank > 0 else -1
        values = {"E": experts, "R": rank, "I": size_in, "O": size_out, "ER": flat, "RE": flat}
        sizes.append(tuple(values[axis] for axis in form.axes(side)))
    return list(dict.fromkeys(sizes))


def _refine(
    layout: str, routed: Iterable[tuple[str, Factor]], shapes: Mapping[str, Shape], base: BaseShapes
) -> str:
    """Tell shared-outer from Megatron's default, which has the same names, by an expert axis of 1."""
    if layout != "megatron-3d":
        return layout
    shared = any(shapes[factor.name][0] < base.experts[factor.parent].count for _, factor in routed)
    return "shared-outer" if shared else layout
