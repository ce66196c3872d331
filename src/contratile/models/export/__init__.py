"""Write trained towers as a folder that another package loads without Contratile.

    exported = export_towers(towers, "transformers", folder)      # CLIPModel.from_pretrained(folder)
    exported.loaded_by                                            # "CLIPModel"

One file per package. Each writes weights (safetensors), settings, tokenizer and image preprocessing, and refuses towers
or heads that its format has no place for.
"""

from contratile.models.export.base import FORMATS as FORMATS
from contratile.models.export.base import Exported as Exported
from contratile.models.export.base import Format as Format
from contratile.models.export.towers import export_towers as export_towers
