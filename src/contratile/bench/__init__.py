"""The benchmarks behind `contratile bench`.

`runner` is the loop that all of them share. `loss`, `family`, `ring`, `cache` and `data` say what is measured,
`contestants` who is compared, `rows` what is recorded, and `plots` draws it.
"""
