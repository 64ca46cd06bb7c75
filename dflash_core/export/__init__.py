"""Drafts in the formats that serving engines read."""

from dflash_core.export.zlab import export_checkpoint

__all__ = ["export_checkpoint"]
