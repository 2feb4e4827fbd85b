"""Why a target cannot be loaded, in one sentence with a way out."""

_NEEDS_TORCHVISION = (
    "its processor needs torchvision; install the build that fits this torch, e.g. "
    "'pip install torchvision'"
)


def why_not_loadable(part: str, error: Exception) -> str:
    """Put what a loader of transformers raised into one sentence.

    Args:
        part: what was being loaded: ``config``, ``processor`` or ``model``.
        error: what it raised.
    """
    text = str(error)
    lower = text.lower()
    if "gated repo" in lower:
        return (
            "it is gated; accept its terms on its Hugging Face page and log in with 'hf auth login'"
        )
    if "not a valid git identifier" in lower:
        return "it has no such --revision; see its Hugging Face page for those that exist"
    if "not a valid model identifier" in lower or "valid repository name" in lower:
        return "it is neither a folder here nor a model on the Hugging Face Hub; check its spelling"
    if "couldn't connect" in lower or "offline mode" in lower:
        return (
            "it is no folder here, is not in the local Hugging Face cache, and the Hub cannot be "
            "reached; give the folder of a downloaded model"
        )
    if "trust_remote_code" in lower or "custom code" in lower:
        return "it brings its own code along; give --trust-remote-code if you trust that code"
    if part == "processor" and ("torchvision" in lower or "video processor" in lower):
        return _NEEDS_TORCHVISION
    if part == "model" and "model.safetensors" in lower:
        return (
            "it has no weights in safetensors files, and pickle files (.bin) are not read; convert "
            "them with transformers' from_pretrained and save_pretrained"
        )
    if "flash_attn" in lower or "attn_implementation" in lower or "flashattention" in lower:
        return f"its attention cannot be set up ({_first_line(text)}); see --attn-implementation"
    if "ignore_mismatched_sizes" in lower:
        return "its weights have other shapes than its config.json says; download it again"
    reason = _first_line(text) or type(error).__name__
    return f"its {part} cannot be loaded ({reason})"


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]
