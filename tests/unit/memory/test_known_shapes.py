"""Operators on shapes that were seen before."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tuner.memory.known_shapes import KnownShapes  # noqa: E402

aten = torch.ops.aten


def meta(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, dtype=dtype or torch.float32, device="meta")


def described(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


CALLS = [
    (aten.mul.Tensor, (meta(8, 4, dtype=torch.bfloat16), 2), {}),
    (aten.mul.Tensor, (meta(8, 4, dtype=torch.int64), 2), {}),
    (aten.mul.Tensor, (meta(8, 4, dtype=torch.int64), 2.0), {}),
    (aten.add.Tensor, (meta(8, 4).t(), meta(4, 8)), {}),
    (aten.cat.default, ([meta(8, 4), meta(8, 4)], 1), {}),
    (aten.cat.default, ([meta(8, 4), meta(8, 4)], 0), {}),
    (aten.topk.default, (meta(8, 4), 2), {}),
    (aten.zeros_like.default, (meta(8, 4),), {"dtype": torch.float16}),
]


def test_a_second_call_gives_what_the_operator_gives() -> None:
    shapes = KnownShapes()
    for _ in range(2):
        for func, args, kwargs in CALLS:
            found, expected = shapes.run(func, args, kwargs), func(*args, **kwargs)
            pairs = (
                zip(found, expected, strict=True)
                if isinstance(found, tuple)
                else [(found, expected)]
            )
            for one, other in pairs:
                assert described(one) == described(other)


def test_a_second_call_does_not_run_the_operator() -> None:
    shapes = KnownShapes()
    calls = []

    class Counted:
        namespace, _schema = "aten", aten.mul.Tensor._schema

        def __call__(self, *args: Any) -> Any:
            calls.append(args)
            return aten.mul.Tensor(*args)

    counted = Counted()
    results = [shapes.run(counted, (meta(8, 4), 2.0), {}) for _ in range(3)]
    assert len(calls) == 1
    assert len({id(result.untyped_storage()) for result in results}) == 3


@pytest.mark.parametrize("func", [aten._unsafe_view.default, aten.view.default])
def test_a_view_shares_its_storage_each_time(func: Any) -> None:
    shapes = KnownShapes()
    for _ in range(3):
        base = meta(8, 4)
        assert shapes.run(func, (base, [4, 8]), {}).untyped_storage()._cdata == (
            base.untyped_storage()._cdata
        )


def test_tensors_with_data_are_computed_each_time() -> None:
    shapes = KnownShapes()
    for value in (1.0, 2.0):
        assert shapes.run(aten.mul.Tensor, (torch.tensor([value]), 3.0), {}).tolist() == [3 * value]
