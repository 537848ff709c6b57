"""Which trainings make up a row: those of the matrix, those with selective saves, those with little memory."""

from rows import LLAMA3, MOVE_ALL_SIZES, NO_AC, ROWS, VARIANTS
from save_rows import NO_MOVE, REGISTERED, SAVES

# Of five steps, as the limit is chosen after the third: name -> the row that it is otherwise.
LIMITED_BY_LINK = {f"{name}, 5 steps": name for name in ("llama3 FSDP2", "llama3 PP 1F1B")}
LINK_VARIANTS = {
    "off": NO_MOVE,
    "link": f"{MOVE_ALL_SIZES} --activation_offload.limit link",
}


def all_names() -> list[str]:
    return list(dict.fromkeys((*ROWS, *SAVES, *LIMITED_BY_LINK)))


def num_ranks(name: str) -> int:
    return ROWS[name].ranks if name in ROWS else 2


def is_slow(name: str) -> bool:
    return name in ROWS and ROWS[name].is_slow


def group_of(name: str) -> tuple[int, bool, str]:
    """Rows of a group share a start of torchrun: processes, whether they are slow, which models."""
    return num_ranks(name), is_slow(name), "llama3" if name.startswith("llama3 ") else "others"


def trainings_of(name: str) -> dict[str, str]:
    """Variant -> flags, of the row ``name``."""
    if name in LIMITED_BY_LINK:
        flags = f"{ROWS[LIMITED_BY_LINK[name]].flags} --training.steps 5"
        return {variant: f"{flags} {extra}" for variant, extra in LINK_VARIANTS.items()}
    trainings = {}
    if name in ROWS:
        row = ROWS[name]
        trainings |= {variant: f"{row.flags} {VARIANTS[variant]}" for variant in row.variants}
    if name in SAVES:
        own_flags, runs = SAVES[name]
        flags = own_flags or ROWS[name].flags
        trainings |= {variant: f"{flags} {extra}" for variant, (extra, _, _) in runs.items()}
        trainings["no AC"] = f"{flags} {NO_MOVE} {NO_AC}"
        if name in REGISTERED or name not in ROWS:
            trainings["plain"] = f"plain {flags}"  # else it is "off", where nothing is attached
    if name == "llama3 FSDP2":  # of five block inputs of 256 KiB, two ranks get room for three and a half each
        trainings["short of host memory"] = f"room={int(2 * 3.5 * 2**18)} {LLAMA3} {MOVE_ALL_SIZES}"
    return trainings


def reference_of(name: str) -> str:
    """The variant whose numbers all others must have."""
    return "plain" if name in SAVES and (name in REGISTERED or name not in ROWS) else "off"
