"""Metrics in words."""

from contratile.report.metric_text import in_a_line, in_words, table, zero_shot_lines

METRICS = {
    "image_to_text_mean_rank": 12.34,
    "image_to_text_median_rank": 1.0,
    "image_to_text_R@1": 0.5,
    "text_to_image_mean_rank": 1234.5,
    "text_to_image_median_rank": 7.0,
    "text_to_image_R@1": 0.25,
    "zero_shot_top1": 0.75,
}


def test_a_line() -> None:
    told = "text to image R@1 0.25, median rank 7 · image to text R@1 0.5, median rank 1 · zero-shot top-1 0.75"
    assert in_a_line(METRICS) == told
    assert in_a_line(METRICS, ("text", "text")).startswith("right to left R@1 0.25, ")


def test_a_table() -> None:
    chance = {"text_to_image_R@1": 0.01, "image_to_text_R@1": 0.01}
    assert table(METRICS, chance, ("image", "text")) == [
        "               R@1     mean rank  median rank",
        "text to image  0.2500  1,234.5    7.0",
        "image to text  0.5000  12.3       1.0",
        "chance         0.0100",
    ]
    assert [line.split("  ")[0] for line in table(METRICS, chance, ("text", "text"))[1:3]] == [
        "right to left",
        "left to right",
    ]


def test_sides_have_the_names_of_columns() -> None:
    sides = ("question", "answer")
    assert in_a_line(METRICS, sides).startswith("answer to question R@1 0.25, ")
    assert table(METRICS, {}, sides)[1].startswith("answer to question  0.2500")
    assert in_words("image_to_text_R@5_pairwise", sides) == "question to answer R@5, pair by pair"
    assert in_words("text_to_image_median_rank", sides) == "answer to question median rank"
    assert in_words("zero_shot_top1", sides) == "zero-shot top-1"


def test_both_kinds_of_metrics() -> None:
    """Where images repeat, each direction has a chance of its own."""
    metrics = {"text_to_image_R@1": 0.5, "image_to_text_R@1": 0.75}
    metrics |= {f"{name}_pairwise": value / 5 for name, value in metrics.items()}
    chance = {"text_to_image_R@1": 0.1, "image_to_text_R@1": 0.2}
    chance |= {f"{name}_pairwise": 0.02 for name in chance}
    assert table(metrics, chance, ("image", "text")) == [
        "                             R@1",
        "text to image                0.5000",
        "  chance                     0.1000",
        "image to text                0.7500",
        "  chance                     0.2000",
        "text to image, pair by pair  0.1000",
        "image to text, pair by pair  0.1500",
        "chance, pair by pair         0.0200",
    ]
    assert in_a_line(metrics) == "text to image R@1 0.5 · image to text R@1 0.75"


def test_zero_shot_metrics() -> None:
    metrics = {"zero_shot_top1": 0.5, "zero_shot_mAP": 0.25, "zero_shot_left_out": 12345, "text_to_image_R@1": 1.0}
    assert zero_shot_lines(metrics, {"zero_shot_top1": 0.1}) == [
        "zero-shot top-1 0.5000 (chance 0.1000)",
        "zero-shot mAP 0.2500",
        "zero-shot samples left out 12,345",
    ]
    assert in_a_line(metrics).endswith("zero-shot mAP 0.25 · zero-shot samples left out 12,345")
