"""x"""

from contratile.engine.backends.triton_configs import Arch

Row = tuple[str, str, int, int, int, int, int, int, int, float, float, float, float, Arch]
SECOND_GENERATION: dict[Arch, list[Row]] = {}
