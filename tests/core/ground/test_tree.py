import json
import math
import pickle

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import WireError
from potluck.core.ground.tree import pack, unpack

both = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def bits(tensor):
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def same(a, b):
    """Equal in structure, types, order of keys and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def mapped(tree, change):
    """The tree with `change` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(child, change) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(child, change) for child in tree)
    return tree


@st.composite
def tensors(draw):
    """Tensors of any type, with arbitrary bits (NaNs of all kinds included) in any layout."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = 2 * math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    pairs = raw.view(dtype).reshape(*shape, 2)
    return {
        "whole": pairs[..., 0].contiguous(),
        "strided": pairs[..., 1],
        "transposed": pairs[..., 0].contiguous().permute(tuple(reversed(range(len(shape))))),
        "first half": pairs.reshape(2, *shape)[0],
        "expanded": pairs.reshape(-1)[:1].sum().to(dtype).expand(shape),
    }[draw(st.sampled_from(["whole", "strided", "transposed", "first half", "expanded"]))]


leaves = st.one_of(
    tensors(), st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**100)
)
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), children, max_size=3),
    ),
    max_leaves=8,
)


@both
@given(tree=trees)
def test_a_tree_comes_back_bit_for_bit(tree, views):
    assert same(unpack(pack(tree), views=views), tree)


@given(trees)
def test_equal_trees_give_equal_bytes(tree):
    assert pack(tree) == pack(mapped(tree, lambda tensor: tensor.clone().contiguous()))


@given(trees)
def test_packing_changes_nothing(tree):
    before = mapped(tree, torch.clone)
    pack(tree)
    assert same(tree, before)


@both
def test_more_than_ten_tensors_keep_their_places(views):
    tree = [torch.tensor(i) for i in range(25)]
    assert same(unpack(pack(tree), views=views), tree)


@both
def test_tensors_that_share_memory_come_back_apart(views):
    base = torch.arange(6.0)
    tree = {
        "base": base,
        "again": base,
        "part": base[2:4],
        "matrix": base.view(2, 3),
        "turned": base.view(2, 3).T,
    }
    back = unpack(pack(tree), views=views)
    assert same(back, mapped(tree, torch.Tensor.contiguous))
    back["base"].zero_()
    assert same(back["again"], base)
    assert same(back["part"], base[2:4])


def test_bytes_are_a_copy_of_the_tensors():
    tensor = torch.arange(3)
    data = pack(tensor)
    tensor.zero_()
    assert unpack(data).tolist() == [0, 1, 2]


def test_what_came_back_can_be_written_to():
    unpack(pack({"a": torch.zeros(2)}))["a"].add_(1)


def test_parameters_arrive_as_plain_tensors():
    back = unpack(pack(torch.nn.Parameter(torch.ones(2))))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


@both
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rarer_types_come_back_too(dtype, views):
    tensor = torch.arange(8, dtype=torch.uint8).view(dtype)
    assert same(unpack(pack(tensor), views=views), tensor)


def test_conjugated_views_arrive_with_their_values():
    tensor = torch.tensor([1 + 2j]).conj()
    assert torch.equal(unpack(pack(tensor)), tensor)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (object(), "tree is a object; expected tensors, numbers, text, None, or dicts and lists of them"),
        ({"a": [0, {1, 2}]}, r"tree\.a\[1\] is a set; expected tensors"),
        ({"a": ({"b": b"bytes"},)}, r"tree\.a\[0\]\.b is a bytes; expected tensors"),
        ([1j], r"tree\[0\] is a complex; expected tensors"),
        ({"a": {1.5: 0}}, r"tree\.a has the key 1\.5; expected text or an integer"),
        ({None: 0}, "tree has the key None; expected text or an integer"),
    ],
)
def test_a_leaf_that_cannot_cross_is_refused_with_its_place(tree, complaint):
    with pytest.raises(WireError, match=f"^{complaint}"):
        pack(tree)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    ],
    ids=["sparse", "meta", "complex128", "bits8"],
)
def test_a_tensor_that_cannot_cross_is_refused_with_its_place(tensor):
    with pytest.raises(WireError, match=r"tree\.a"):
        pack({"a": tensor})


def written(skeleton, tensors=None):
    """A well-formed file with any skeleton."""
    return safetensors.torch.save(tensors or {}, metadata={"potluck": skeleton})


@both
@pytest.mark.parametrize(
    "skeleton",
    [
        "",
        "{",
        "3",
        "[]",
        "null",
        '"dict"',
        "{}",
        '{"value": 1, "list": []}',
        '{"set": []}',
        '{"tensor": 0}',
        '{"tensor": [0]}',
        '{"dict": 5}',
        '{"dict": [["a"]]}',
        '{"dict": [["a", 3]]}',
        '{"dict": [[["a"], {"value": 1}]]}',
        '{"list": null}',
        '{"list": [7]}',
        "1" * 5000,
        "[" * 100_000,
        '{"list": [' * 5_000 + "]}" * 5_000,
    ],
    ids=lambda skeleton: skeleton[:40],
)
def test_a_false_skeleton_is_a_wire_error(skeleton, views):
    with pytest.raises(WireError, match="not a Potluck message"):
        unpack(written(skeleton), views=views)


@both
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"potluck",
        b"\xff" * 8,
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_other_bytes_are_a_wire_error(data, views):
    with pytest.raises(WireError, match=r"not a Potluck message: .*; expected safetensors written by potluck"):
        unpack(data, views=views)


def header(**tensors):
    text = json.dumps({"__metadata__": {"potluck": '{"tensor": 0}'}, **tensors}).encode()
    return len(text).to_bytes(8, "little") + text


@both
@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        ({"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]}, b""),
        ({"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}, b""),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 0]}, b""),
        ({"dtype": "F6_E2M3", "shape": [0], "data_offsets": [0, 0]}, b""),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, bytes(4)),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, bytes(8)),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, bytes(8)),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, b""),
        ({"dtype": "U8", "shape": [-1, -4], "data_offsets": [0, 4]}, bytes(4)),
        ({"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}, bytes(1)),
        ({"dtype": "U8", "shape": [True], "data_offsets": [False, True]}, bytes(1)),
    ],
    ids=[
        *(
            "overflowing strides",
            "overflowing size",
            "more than there is",
            "unknown type",
            "cut off",
            "bytes behind it",
        ),
        *("a gap before it", "before the start", "negative sizes", "a size with a point", "true and false"),
    ],
)
def test_a_false_header_is_a_wire_error(tensor, data, views):
    with pytest.raises(WireError, match="not a Potluck message"):
        unpack(header(**{"0": tensor}) + data, views=views)


def test_tensors_that_overlap_are_a_wire_error_also_in_views():
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    with pytest.raises(WireError, match="not a Potluck message"):
        unpack(header(**{"0": tensor, "1": tensor}) + bytes(4), views=True)


def test_views_refuse_what_a_processor_would_read_across_a_boundary():
    odd = {"0": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "1": {"dtype": "F32", "shape": [1]}}
    odd["1"]["data_offsets"] = [1, 5]
    with pytest.raises(WireError, match=r"tensor 1 of shape .* lies at no multiple of its 4 bytes"):
        unpack(header(**odd) + bytes(5), views=True)


@both
def test_safetensors_of_others_are_a_wire_error(views):
    with pytest.raises(WireError, match="not a Potluck message"):
        unpack(safetensors.torch.save({"weight": torch.zeros(2)}), views=views)


class Trap:
    """Unpickling it leaves a trace."""

    def __reduce__(self):
        return Trap.sprung.append, (1,)

    sprung = []


def test_nothing_that_arrives_runs():
    trap = pickle.dumps(Trap())
    for data in (trap, written(json.dumps({"value": trap.decode("latin1")}))):
        try:
            unpack(data)
        except WireError:
            continue
    assert Trap.sprung == []


def test_a_digest_stands_for_the_bytes():
    assert digest(b"a") == digest(b"a") != digest(b"b")
    assert digest(b"") == "cae66941d9efbd404e4d88758ea67670"  # printf "" | b2sum -l 128
