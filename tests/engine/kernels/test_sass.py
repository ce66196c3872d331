"""Reading machine code: instructions, what they read and write, blocks, loops and ways through them."""

from collections import Counter

import pytest

from tests.engine.kernels.instructions import Walk, class_of
from tests.engine.kernels.sass import Code, Instruction


def code(text: str) -> Code:
    """Of lines as nvdisasm writes them, without addresses."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return Code(
        "\n".join(line if line.endswith(":") else f"        /*{i:04x}*/   {line} ;" for i, line in enumerate(lines))
    )


def instruction(text: str) -> Instruction:
    ((found,),) = (block.instructions for block in code(text).blocks if block.instructions)
    return found


@pytest.mark.parametrize(
    ("text", "writes", "reads"),
    [
        ("FADD R1, R2.reuse, -R3", "R1", "R2 R3"),
        ("@!P1 FSEL R1, R2, -INF, !P0", "R1", "R2 P0 P1"),
        ("ISETP.GE.AND P0, PT, R1, R2, P3", "P0", "R1 R2 P3"),
        ("PLOP3.LUT P0, P2, P1, PT, UP2, 0x40, 0x0", "P0 P2", "P1 UP2"),
        ("LEA R4, P1, R6, c[0x0][0x178], 0x3", "R4 P1", "R6"),
        ("IADD3.X R4, RZ, R6, RZ, P1, !PT", "R4", "R6 P1"),
        ("SHFL.BFLY PT, R1, R2, 0x2, 0x1f", "R1", "R2"),
        ("IMAD.WIDE.U32 R4, R8, R10, RZ", "R4 R5", "R8 R9 R10 R11"),
        ("LDG.E.128 R4, desc[UR14][R8.64+0x80]", "R4 R5 R6 R7", "UR14 UR15 UR16 UR17 R8 R9 R10 R11"),
        ("STS.64 [R3+0x10], R4", "", "R3 R4 R5"),
        ("STSM.16.M88.4 [R3], R4", "", "R3 R4 R5 R6 R7"),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "R4 R5 R6 R7", ""),
        ("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24", " ".join(f"R{i}" for i in range(24, 32)), ""),
        ("CS2R R8, SRZ", "R8 R9", ""),
        ("FADD2 R8, R10.F32x2.HI_LO, R12.F32x2.HI_LO", "R8 R9", "R10 R11 R12 R13"),
        ("LDGSTS.E.BYPASS.128 [R1], [R2.64], P0", "", "P0"),
        ("R2UR UR4, R5", "UR4", "R5"),
    ],
)
def test_registers(text: str, writes: str, reads: str) -> None:
    found = instruction(text)
    assert found.writes == set(writes.split())
    assert found.reads >= set(reads.split())
    if not found.name.startswith(("IMAD.W", "LDG")):  # of wide instructions, neighbours too
        assert len(found.reads) <= len(reads.split()) or not reads or text.startswith("LDGSTS")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MUFU.EX2 R1, R2", "exp2"),
        ("MUFU.RCP R1, R2", "other special functions"),
        ("CREDUX.MAX.F32 UR4, R5", "shuffles"),
        ("FADD2 R2, R4, R6", "adds"),
        ("FFMA R1, R2, R3, R4", "fma, mul"),
        ("FMNMX3 R1, R2, R3, R4", "min, max"),
        ("USEL UR4, UR5, UR6, UP0", "selects"),
        ("F2FP.BF16.F32.PACK_AB R1, R2, R3", "conversions"),
        ("IMAD.MOV.U32 R1, RZ, RZ, R2", "moves"),
        ("IMAD.U32 R1, RZ, RZ, UR4", "moves"),
        ("HFMA2.MMA R1, -RZ, RZ, 0, 0", "moves"),
        ("IMAD.U32 R1, R2, 0x20, R3", "integer and compare"),
        ("UIADD3 UR4, UR5, 0x1, URZ", "integer and compare"),
        ("FSETP.GT.AND P0, PT, R1, R2, PT", "integer and compare"),
        ("STG.E [R2.64], R4", "memory"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "control"),
    ],
)
def test_classes(text: str, expected: str) -> None:
    assert class_of(instruction(text)) == expected


def test_blocks_end_at_labels_branches_and_exits() -> None:
    found = code("""
        MOV R1, 0x0
        @P0 BRA `(.L_x_1)
        @P1 EXIT
        BRA.U UP0, `(.L_x_1)
        FADD R1, R1, R1
        .L_x_1:
        BRA.DIV UR4, `(.L_x_2)
        EXIT
        .L_x_2:
        WARPSYNC.COLLECTIVE R3, `(.L_x_1)
        .L_x_3:
        BRA `(.L_x_3)
    """)
    assert [len(block.instructions) for block in found.blocks] == [2, 2, 1, 1, 1]  # what nothing leads to is gone
    assert [block.next for block in found.blocks] == [(3, 1), (3, 2), (3,), (4,), ()]
    assert [block.ends for block in found.blocks] == [False] * 4 + [True]


def test_a_call_within_the_kernel_is_a_jump() -> None:
    found = code("""
        .L_x_0:
        FADD R1, R1, R1
        @P1 CALL.REL.NOINC `(.L_x_1)
        BRA `(.L_x_0)
        .L_x_1:
        CALL.REL.NOINC `($__internal_0)
        EXIT
    """)
    (loop,) = found.loops
    assert loop.body == {0, 1} and found.blocks[0].next == (2, 1)
    assert len(found.blocks[2].instructions) == 2  # it comes back


KERNEL = """
    IMAD R20, R21, R22, RZ
    .tiles:
    CS2R R4, SRZ
    CS2R R6, SRZ
    IADD3 R10, R10, 0x80, RZ
    IADD3 R20, R20, 0x1, RZ
    LDGSTS.E.128 [R30], [R10.64]
    @P0 BRA `(.after)
    UMOV UR4, URZ
    .features:
    LDSM.16.M88.4 R12, [R31]
    HMMA.16816.F32.BF16 R4, R12, R16, R4
    BAR.SYNC.DEFER_BLOCKING 0x0
    @P1 BRA `(.features)
    .after:
    FMUL R4, R4, R40
    @P2 BRA `(.exact)
    MUFU.EX2 R4, R4
    BRA `(.join)
    .exact:
    MUFU.EX2 R5, R5
    MUFU.EX2 R6, R6
    FADD R4, R5, R6
    .join:
    FADD R41, R41, R4
    STG.E [R20.64], R4
    @P3 BRA `(.tiles)
    STG.E [R42.64], R41
    EXIT
"""


def test_loops_and_ways() -> None:
    found = code(KERNEL)
    features, tiles = found.loops
    assert features.body < tiles.body
    walk = Walk(found, steps=8, path="interior")
    assert walk.tile == tiles and walk.features == {features}
    assert [stop.block for stop in walk.stops] == [1, 2, 3, 4, 5, 7]  # never past the feature loop
    assert [stop.block for stop in Walk(found, steps=8, path="special").stops] == [1, 2, 3, 4, 6, 7]


def test_what_is_the_product() -> None:
    walk = Walk(code(KERNEL), steps=8, path="interior")
    # Twice zeros, an address, a copy, the branch past the loop and its counter; eight rounds of four.
    assert walk.product == 6 + 8 * 4
    assert walk.counted == {"fma, mul": 1, "exp2": 1, "adds": 1, "memory": 1, "control": 3, "integer and compare": 1}
    assert sum(walk.once.values()) == 3 and not walk.notes
    special = Walk(code(KERNEL), steps=8, path="special")
    assert special.counted["exp2"] == 2 and special.counted["adds"] == 2


def test_one_exponential_more_is_one_more() -> None:
    mutant = KERNEL.replace("MUFU.EX2 R4, R4", "MUFU.EX2 R4, R4\nMUFU.EX2 R4, R4")
    assert Walk(code(mutant), steps=8, path="interior").counted["exp2"] == 2
    unused = KERNEL.replace("FMUL R4, R4, R40", "FMUL R4, R4, R40\nMUFU.EX2 R50, R40")
    assert "1 MUFU.EX2 taken for the product" in Walk(code(unused), steps=8, path="interior").notes


def test_peeled_and_unrolled_rounds_are_the_product() -> None:
    peeled = KERNEL.replace(
        ".after:", "LDSM.16.M88.4 R12, [R32]\nIADD3 R33, R33, 0x1, RZ\nHMMA.16816.F32.BF16 R4, R12, R16, R4\n.after:"
    )
    walk = Walk(code(peeled), steps=8, path="interior")
    assert walk.rounds == 7 and walk.product == 6 + 3 + 7 * 4
    assert walk.counted == Walk(code(KERNEL), steps=8, path="interior").counted
    unrolled = Walk(code(KERNEL.replace("@P1 BRA `(.features)", "NOP")), steps=8, path="interior")
    assert unrolled.notes == ["feature loop unrolled"] and unrolled.counted == walk.counted + Counter(control=2)


def test_other_loops_are_named() -> None:
    looped = KERNEL.replace("FADD R41, R41, R4", ".again:\nFADD R41, R41, R4\n@P5 BRA `(.again)")
    walk = Walk(code(looped), steps=8, path="interior")
    assert walk.notes == ["a loop of 1 blocks counted as one round"]


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(AssertionError, match="no tensor-core instructions"):
        Walk(code("FADD R1, R1, R1\nEXIT"), steps=8, path="interior")
    with pytest.raises(AssertionError, match="a jump to anywhere"):
        code("BRX R2, 0x10\nEXIT")
