"""Random calls of every loss in every dtype, each held to the rule of precision.

    python -m tests.losses.fuzz --cases 20000 --seed 0        # exit code 1 if the rule was broken
    python -m tests.losses.fuzz --only 0:1234                 # one case again, with its numbers

The rule, with errors as the largest absolute difference of a tensor from `contratile.reference` in fp64:

    value       error <=       naive error + eps
    gradient    error <= 1.5 * naive error + eps        of features, keys, extra keys, hard negatives, scale and bias

and nothing that is finite in the naive formula may be non-finite. An exception breaks the rule too.

naive error     That of `contratile.reference` on the same numbers in the accumulation dtype (fp32, or fp64 for fp64
                features), gradients then rounded to the dtype of what they belong to: what mixed precision gives
                to somebody who writes the formula down. One such error is partly luck: a mean of errors of both
                signs can be 0. It is therefore the largest of several: one on the numbers themselves, the others
                with features in another order and each number moved by up to `UNITS` in its last place (ours rounds a
                score about four times more than the formula does), every other time all of a tensor alike, which
                draws the roundings anew. Where rounding decides much (two large scores almost equal), that shows
                it; where it decides nothing (one key far above the others, a single pair), these runs agree and the
                rule is as sharp as without them. `FEW` runs, and `RUNS` before anything is called broken. If all
                rows are equal, so are their roundings: D terms of one sign are rounded by up to D/2 units alike.
eps             what any computation in that dtype loses; the last four grow with the scores:
              - `ROUNDINGS` + sqrt(terms) roundings at the largest element of the true result. Ours divides the scale by
                ln 2, multiplies it into the queries, multiplies the result by ln 2 and by a row's share; and rounding
                errors of a sum of many terms grow like the root of their number: N for features, N * M for numbers.
              - 4 roundings of a sum of exponentials: around 1 its logarithm, and with it the weight of a key, cannot be
                closer than that, however small the loss. Not for a single pair, which has nothing to round (but if
                the target is smoothed, which multiplies by parts of 1).
              - half a unit in the last place of the largest element, if it is returned in 16 bit: the result is
                rounded, and to which side is luck in both. With "doc_to_doc" three for documents: gradients of two
                calls are rounded, and so is their sum.
              - the smallest number of the dtype: below it there is nothing to be precise with. Exponentials of fp32
                end at about 1e-38, and what they are multiplied with (scale and features) is below 1e10 here.
              - for kinds of numbers with exact ties, one rounding of the largest score: log-sum-exps of tied scores
                are all rounded alike, by how far log(ties) is from a whole last place, which no move draws anew.
              - for `sup_con`, several positives and smoothed targets, `ROUNDINGS` roundings of the largest score: sums
                over classes come from the features in fp64, beside scores that are rounded; the formula rounds both
                alike. And of their gradients those of a sum of N terms, which the formula takes after positives and
                negatives cancel.
              - with a teacher, likewise: the mean of scores under its softmax is taken from a log-sum-exp, also of one
                key.
              - for truncated rows that are divided by their norms, `ROUNDINGS` and those of a sum of N terms for
                features: the part of a gradient along the row is taken off, which may be all of it.
              - for hard negatives, two roundings of the largest score: theirs is not made by the product that makes the
                positive's. With a guide also for extra keys, which are joined by how far sums are above the positive's
                score: without a guide no more than the largest score is near it, with one all that is may be dropped.
              - for truncated rows, two roundings of the largest score: norms multiply products, not the rows.
              - for fp64 features, the error of the truth itself, which is in fp64 too.

Margins of whole-number features sit on ties: products are exact, so is the comparison, and moved numbers are compared
with the margin less 1/2, which no whole number can tell from the margin.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import contratile as ct
from contratile import reference
from tests.helpers import accumulation
from tests.losses.fuzz_cases import NUMBERS, TIED, WHOLE, Case, draw

FEW, RUNS = 4, 64
UNITS = 4
ROUNDINGS = 8
FACTORS = {"value": 1.0, "gradient": 1.5}
SMALLEST = {torch.float64: 1e-290, torch.float32: 1e-28, torch.bfloat16: 1e-28, torch.float16: 2.0**-25}


class Verdict(NamedTuple):
    """How one tensor did: `ratio` is its error in units of what is allowed."""

    case: Case
    what: str
    error: float
    naive: float
    eps: float
    ratio: float

    def __str__(self) -> str:
        told = f"error {self.error:.2e}, naive {self.naive:.2e}, eps {self.eps:.2e}"
        return f"{self.ratio:9.3g}  {self.what}: {told}  | {self.case}"


def judge(case: Case) -> list[Verdict]:
    """One verdict for each value and each gradient."""
    acc = accumulation(case.dtype)
    true, naive = results(case, reference, torch.float64), results(case, reference, acc)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ct.NotNormalizedWarning)  # features of every norm are meant here
            got = results(case, ct, None)
    except Exception as error:  # whatever it is: the naive formula went through
        return [Verdict(case, f"raised {type(error).__name__}", float("inf"), 0.0, 0.0, float("inf"))]
    known = [
        what for what in true if naive[what].isfinite().all() and true[what].isfinite().all() and true[what].numel()
    ]
    worst = {what: distance(naive[what], true[what]) for what in known}
    for run in range(1, RUNS):
        found = {what: verdict(case, what, got[what], true[what], worst[what], acc) for what in known}
        if run >= FEW and all(v.ratio <= 1 for v in found.values()):
            break
        again = results(case, reference, acc, moved=run)
        worst = {what: max(worst[what], distance(again[what], true[what])) for what in known}
    return list(found.values())


def verdict(case: Case, what: str, got: Tensor, true: Tensor, naive: float, acc: torch.dtype) -> Verdict:
    size, unit = float(true.abs().max()), torch.finfo(acc).eps / 2
    eps = (ROUNDINGS + case.terms(what) ** 0.5) * unit * size + SMALLEST[got.dtype]
    if torch.finfo(got.dtype).bits == 16:
        thrice = "doc_to_doc" in case.constants.get("directions", ()) and what != "gradient query"
        eps += torch.finfo(got.dtype).eps / 2 * size * (3 if thrice else 1)
    summed = case.loss == "sup_con" or bool({"label_smoothing", "teacher"} & case.constants.keys())
    summed = summed or (case.constants.get("same_id") == "positive" and case.loss != "siglip_loss")
    if summed:
        eps += (ROUNDINGS * case.score + ROUNDINGS + case.rows**0.5) * unit * case.lever(what)
    if case.constants.get("matryoshka_normalize"):
        eps += (ROUNDINGS + case.rows**0.5) * unit * case.lever(what)
    joined = {"hard_negatives", "extra_keys"} if "guide" in case.constants else {"hard_negatives"}
    if joined & case.leaves.keys() or case.constants.get("matryoshka_normalize"):
        eps += 2 * unit * case.score * case.lever(what)
    if summed or case.rows > 1 or case.loss == "pair_lse":
        eps += 4 * unit * case.lever(what)
        eps += unit * case.score * case.lever(what) if case.kind in TIED else 0
    if acc == torch.float64:
        eps += (ROUNDINGS + case.rows) * unit * case.rows * case.bound * case.lever(what)
    error = distance(got, true)
    allowed = (
        FACTORS[what.split()[0]] * naive + eps
    )  # infinite at the end of a dtype's range, where naive runs overflow
    return Verdict(case, what, error, naive, eps, 0.0 if allowed == float("inf") else error / allowed)


def distance(x: Tensor, true: Tensor) -> float:
    return float((x.double() - true).abs().max()) if x.isfinite().all() else float("inf")


def results(case: Case, module: Any, dtype: torch.dtype | None, moved: int = 0) -> dict[str, Tensor]:
    """Values and gradients of one call: `ct` on the numbers as they are, `reference` in `dtype`."""
    generator = torch.Generator().manual_seed(moved)
    order = torch.randperm(next(iter(case.leaves.values())).shape[1], generator=generator) if moved else None
    if order is not None and "matryoshka_dims" in case.constants:
        order = order.sort().values  # its first features are others otherwise
    leaves = {name: x.detach().to(dtype or x.dtype) for name, x in case.leaves.items()}
    constants = {name: converted(x, dtype) for name, x in case.constants.items()}
    if order is not None:
        by = UNITS + (len(order) // 4 if case.kind == "equal" else 0)
        leaves = {name: moved_by(x, order, by, generator, alike=moved % 2 == 0) for name, x in leaves.items()}
        for name in sorted(NUMBERS & constants.keys()):
            number = torch.tensor(constants[name], dtype=dtype)
            constants[name] = moved_by(number, order, by, generator, alike=True).item()
    if moved and case.kind in WHOLE and "margin" in constants:
        constants["margin"] -= 0.5
    for x in leaves.values():
        x.requires_grad_()
    how = {**case.how, "group": None} if module is ct else {}
    out = getattr(module, case.loss)(**leaves, **constants, **how)
    values = [x for x in ([out] if isinstance(out, Tensor) else out) if x.numel()]
    upstream = [given(x, number) for number, x in enumerate(values)]
    grads = torch.autograd.grad(values, list(leaves.values()), upstream)
    found = {f"value {number}": value.detach() for number, value in enumerate(values)}
    for name, grad in zip(leaves, grads, strict=True):
        grad = grad if order is None or grad.dim() == 0 else grad[..., order.argsort()]
        found[f"gradient {name}"] = grad if dtype in (None, torch.float64) else grad.to(case.leaves[name].dtype)
    return found


def moved_by(x: Tensor, order: Tensor, by: int, generator: torch.Generator, *, alike: bool) -> Tensor:
    """Features in another order, and each number moved by some units in its last place, all `alike` or not."""
    x = x if x.dim() == 0 else x[..., order]
    units = torch.randint(-by, by + 1, () if alike else x.shape, generator=generator).to(x.dtype)
    return x * (1 + units * torch.finfo(x.dtype).eps)


def converted(x: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x):
        return tuple(converted(y, dtype) for y in x)
    return x.to(dtype or x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def given(value: Tensor, number: int) -> Tensor:
    """The upstream gradient: 1 for a scalar, random for a vector."""
    if value.dim() == 0:
        return torch.ones_like(value)
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(value.shape, generator=generator).to(value.dtype)


def violations(cases: int, seed: int) -> list[Verdict]:
    """What breaks the rule in these cases, worst first."""
    found = (v for number in range(cases) for v in judge(draw(seed, number)))
    return sorted((v for v in found if not v.ratio <= 1), key=lambda v: -v.ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random calls of every loss, held to the rule of precision.")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="SEED:NUMBER", help="judge this case alone and print all its numbers")
    parser.add_argument("--worst", type=int, default=25, help="how many of the worst to print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        seed, number = (int(x) for x in options.only.split(":"))
        found = judge(draw(seed, number))
        print(*found, sep="\n")
        return int(any(not v.ratio <= 1 for v in found))
    return fuzz(options.cases, options.seed, options.worst)


def fuzz(cases: int, seed: int, worst: int) -> int:
    """Judge, telling how far it is; 1 if the rule was broken."""
    start = time.time()
    broken: set[str] = set()
    bad: list[Verdict] = []
    near: list[Verdict] = []
    for done in range(1, cases + 1):
        found = judge(draw(seed, done - 1))
        bad += [v for v in found if not v.ratio <= 1]
        near += [v for v in found if v.ratio <= 1]
        broken |= {v.case.name for v in bad[-len(found) :]}
        if done % 1000 == 0 or done == cases:
            near = sorted(near, key=lambda v: -v.ratio)[:worst]
            print(f"{done} cases, {len(broken)} break the rule, {time.time() - start:.0f} s", flush=True)
    print(f"\nworst {worst}: error / allowed", *sorted(bad + near, key=lambda v: -v.ratio)[:worst], sep="\n")
    print("violations by loss:", dict(Counter(v.case.loss for v in bad)) or "none")
    print("violations by tensor:", dict(Counter(v.what for v in bad)) or "none")
    print("violations by kind of numbers:", dict(Counter(v.case.kind for v in bad)) or "none")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
