"""Metrics in words."""

from contratile.train.words import in_a_line, table

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
    told = "text to image R@1 0.25, median rank 7 · image to text R@1 0.5, median rank 1 · zero shot top1 0.75"
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
