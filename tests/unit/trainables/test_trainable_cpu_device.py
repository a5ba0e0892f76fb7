import pytest
import torch

from trainables.megatron_core.cpu_device import PATCHES, cpu_device, replaced, without_compilation


@pytest.fixture(scope="module", autouse=True)
def megatron_core() -> None:
    with without_compilation():
        import megatron.core.models.gpt  # noqa: F401


def named_by_patches() -> list[object]:
    from megatron.core.tensor_parallel import random

    return [
        torch.zeros,
        torch.tensor,
        torch.Tensor.type,
        torch.Tensor.cuda,
        torch.nn.Module.cuda,
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.distributed.new_group,
        torch.distributed.all_gather,
        random._get_cuda_rng_state,
    ]


def test_everything_is_undone_also_after_an_error() -> None:
    before = named_by_patches()

    def fail() -> None:
        with cpu_device():
            assert all(a is not b for a, b in zip(before, named_by_patches(), strict=True))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert named_by_patches() == before


def test_cuda_names_mean_the_cpu() -> None:
    with cpu_device():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.zeros(2, device="cpu").type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type(torch.float64).dtype is torch.float64
        assert torch.zeros(2).cuda().device.type == "cpu"
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()


def test_patches_can_be_chosen_one_by_one() -> None:
    chosen = [patch for patch in PATCHES if patch.__name__ == "types_are_named_cuda"]
    with cpu_device(chosen):
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_every_patch_says_which_upstream_code_needs_it() -> None:
    for patch in PATCHES:
        assert patch.__doc__ is not None
        assert ".py" in patch.__doc__


def test_recompute_sees_the_same_dropout() -> None:
    from megatron.core.tensor_parallel import random

    with cpu_device():
        random.initialize_rng_tracker(force_reset=True)
        tracker = random.get_cuda_rng_tracker()
        tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, 1)
        torch.manual_seed(3)
        masks = []

        def layer(inputs: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                outputs = torch.nn.functional.dropout(inputs, 0.5)
            masks.append(outputs.detach() != 0)
            return outputs * torch.rand(64)

        inputs = torch.ones(64, requires_grad=True)
        random.checkpoint(layer, False, inputs).sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)


def test_replaced_deletes_what_was_not_there() -> None:
    class Owner:
        kept = 1

    with replaced(Owner, kept=2, added=3):
        assert (Owner.kept, Owner.added) == (2, 3)  # type: ignore[attr-defined]
    assert Owner.kept == 1
    assert not hasattr(Owner, "added")


def test_nothing_is_compiled_at_import_and_compilation_comes_back() -> None:
    original = torch.compile
    with without_compilation():

        @torch.compile
        def plain(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def with_options(x: int) -> int:
            return x + 2

    assert torch.compile is original
    assert (plain(1), with_options(1)) == (2, 3)
