"""What kernels ask about the GPU that they will run on."""

import torch


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # interpreted: a few, so that persistent programs take turns
    return torch.cuda.get_device_properties(device).multi_processor_count


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, ...; `interpreter` where there is no GPU."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def registers(most: int) -> dict[str, int]:
    """A launch option for NVIDIA, whose compiler would rather spill than keep a second program from
    a multiprocessor."""
    return {} if torch.version.hip else {"maxnreg": most}
