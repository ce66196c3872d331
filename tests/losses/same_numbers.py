"""Do two versions of the library give the same numbers, to the last bit? A fixed set of 200 calls, each a digest.

    python -m tests.losses.same_numbers > old.txt      # in one checkout
    python -m tests.losses.same_numbers > new.txt      # in the other, on the same machine
    diff old.txt new.txt

The calls are the first ones of `fuzz_cases` (every loss, dtype, layout and option, values and all gradients), every
tenth of them also with `backend="dense"`, and some of many tiles. Digests differ between CPUs.
"""

import argparse
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import contratile as ct
from tests.helpers import randn
from tests.losses.fuzz_cases import Case, draw

CASES = 200


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{x.dtype}{tuple(x.shape)}".encode())
        found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def outcome(function: Callable[..., Any], leaves: dict[str, Tensor], **constants: Any) -> list[Tensor]:
    """Values, statistics and gradients."""
    given = {name: x.detach().clone(memory_format=torch.preserve_format) for name, x in leaves.items()}
    given = {name: x.requires_grad_() for name, x in given.items()}
    result = function(**given, **constants)
    values = [result] if isinstance(result, Tensor) else [x for x in result if isinstance(x, Tensor) and x.numel()]
    found = [x for part in (result if isinstance(result, tuple) else ()) if not isinstance(part, Tensor) for x in part]
    upstream = [torch.linspace(0.5, 2.0, x.numel()).to(x).reshape(x.shape) for x in values]
    grads = torch.autograd.grad(values, list(given.values()), upstream, materialize_grads=True)
    return [*values, *(x for x in found if x is not None), *grads]


def drawn(case: Case, **more: Any) -> list[Tensor]:
    function = getattr(ct, case.loss)
    return outcome(function, case.leaves, **case.constants, **case.how, **more)


def calls(cases: int) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    for number in range(cases):
        case = draw(seed=0, number=number)
        yield str(case), lambda case=case: drawn(case)  # type: ignore[misc]
        if case.loss in ("clip_loss", "info_nce", "nt_xent", "siglip_loss") and number % 3 == 0:
            yield f"{case} return_stats", lambda case=case: drawn(case, return_stats=True)  # type: ignore[misc]
        if number % 10 == 0:
            yield f"{case} dense", lambda case=case: drawn(case, backend="dense")  # type: ignore[misc]
    for n, d in ((1500, 512), (700, 64), (256, 64)):
        x, y = randn(n, d, seed=1), randn(n, d, seed=2)
        x, y = (torch.nn.functional.normalize(z) for z in (x, y))
        pair = {"image": x, "text": y, "scale": torch.tensor(20.0)}
        yield f"clip_loss {n} {d}", lambda p=pair: outcome(ct.clip_loss, p)  # type: ignore[misc]
        yield f"siglip_loss {n} {d}", lambda p=pair: outcome(ct.siglip_loss, p, bias=-10.0)  # type: ignore[misc]
        views = {"z1": x, "z2": y}
        yield f"nt_xent {n} {d}", lambda v=views: outcome(ct.nt_xent, v, temperature=0.1)  # type: ignore[misc]
        yield f"sup_con {n} {d}", lambda z=x, n=n: outcome(ct.sup_con, {"z": z}, labels=torch.arange(n) % 50)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, call in calls(options.cases):
        try:
            print(digest(call()), name)
        except ValueError as error:  # statistics do not go with every option
            print("refused", name, error)


if __name__ == "__main__":
    os.environ["CONTRATILE_TUNED"] = "0"  # tuned tiles add in another order
    main()
