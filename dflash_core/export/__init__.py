"""Drafts in the formats that serving engines read.

`zlab` and `speculators` write a format, `folder` lets it appear as a whole, `verify` reads it back, `run_facts` and
`model_card` tell where it comes from, and `exporting` joins them.
"""

from dflash_core.export.exporting import FORMATS, Exporting, export_checkpoint, export_draft

__all__ = ["FORMATS", "Exporting", "export_checkpoint", "export_draft"]
