"""The ranks of a service: whose rows each computes, and sums, files and errors that they have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.service import model_folder
from mindspeed_rl.service.backend import CallError


@dataclass(frozen=True)
class ServiceRanks:
    """This rank among all of them, which make the same calls in the same order; methods are collective.

    Attributes:
        rank, size: of the world.
        data_rank, data_size: of the data-parallel ranks, each of which computes every n-th row of a pass.
    """

    rank: int
    size: int
    data_rank: int
    data_size: int

    @classmethod
    def from_world(cls) -> ServiceRanks:
        """Read the process groups of this process."""
        data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return cls(dist.get_rank(), dist.get_world_size(), data_rank, data_size)

    def select_rows(self, rows: Rows) -> Rows:
        """Return the rows that this rank computes."""
        return rows if self.data_size == 1 else rows.select(range(self.data_rank, len(rows), self.data_size))

    def gather_rows(self, results: tuple[list[Tensor], ...], count: int) -> tuple[list[Tensor], ...]:
        """Return the results of all rows from those of this rank's, a list by row for each result.

        Args:
            count: number of all rows.
        """
        if self.data_size == 1:
            return results
        parts: list[tuple[list[Tensor], ...]] = [results] * self.data_size
        dist.all_gather_object(parts, results, group=parallel_state.get_data_parallel_group_gloo())
        size = self.data_size
        return tuple([parts[row % size][column][row // size] for row in range(count)] for column in range(len(results)))

    def sum_gradients(
        self, leaves: Mapping[str, Tensor], drop_repeated: Callable[[Mapping[str, Tensor]], None]
    ) -> dict[str, Tensor]:
        """Return the gradients of all ranks' rows, by name.

        Args:
            leaves: full matrices, whose `grad` has this rank's part.
            drop_repeated: sets what other tensor ranks have too to 0.
        """
        if self.size == 1:
            return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        own = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        drop_repeated(own)
        flat = torch.cat([gradient.flatten() for gradient in own.values()])
        dist.all_reduce(flat)
        parts = flat.split([leaf.numel() for leaf in leaves.values()])
        # copies: tensors that begin at another address may be rounded otherwise
        return {name: part.view_as(leaf).clone() for (name, leaf), part in zip(leaves.items(), parts)}

    def join_vocabulary(self, weight: Tensor) -> Tensor:
        """Return all rows of a matrix of the vocabulary from the rows of each tensor rank."""
        group = parallel_state.get_tensor_model_parallel_group()
        assert group is not None
        if group.size() == 1:
            return weight
        parts = [torch.empty_like(weight) for _ in range(group.size())]
        dist.all_gather(parts, weight.contiguous(), group=group)
        return torch.cat(parts)

    def run_on_first(self, work: Callable[[], object]) -> None:
        """Do something on the first rank, while the others wait; all raise what it raises."""
        if self.size == 1:
            work()
            return
        problem: tuple[bool, str] | None = None
        if self.rank == 0:
            try:
                work()
            except CallError as error:
                problem = True, str(error)
            except Exception as error:  # noqa: BLE001  (raised below, on every rank)
                problem = False, f"{type(error).__name__}: {error}"
        shared = [problem]
        dist.broadcast_object_list(shared, src=0)
        if shared[0] is not None:
            is_callers, text = shared[0]
            raise CallError(text) if is_callers else RuntimeError(text)

    @contextlib.contextmanager
    def building(self, folder: Path) -> Iterator[Path]:
        """Yield a folder that all ranks fill; see `model_folder.building`."""
        with contextlib.ExitStack() as stack:
            self.run_on_first(lambda: stack.enter_context(model_folder.building(folder)))
            yield folder.with_name(f"{folder.name}.partial")
            # the others wait for the complete folder, and raise what goes wrong with it
            self.run_on_first(stack.close)
