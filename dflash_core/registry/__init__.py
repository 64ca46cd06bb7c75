"""Which drafter of a target is in use, how it became that, and what else was considered (docs/registry.md).

`lineage` is the table of everything that was ever decided, `promotion` the rule by which a drafter replaces the current
one, `files` the copies of promoted drafters, `store` joins them into a registry that survives a kill at any moment, and
`describe` shows it. Nothing here needs torch.
"""

from dflash_core.registry.describe import describe_entry, describe_list
from dflash_core.registry.files import Export, read_export
from dflash_core.registry.lineage import Decision, Entry
from dflash_core.registry.promotion import Measured, PromptResult, Rule, Verdict, decide
from dflash_core.registry.store import Candidate, Registry, find_registries, registry_folder

__all__ = [
    "Candidate",
    "Decision",
    "Entry",
    "Export",
    "Measured",
    "PromptResult",
    "Registry",
    "Rule",
    "Verdict",
    "decide",
    "describe_entry",
    "describe_list",
    "find_registries",
    "read_export",
    "registry_folder",
]
