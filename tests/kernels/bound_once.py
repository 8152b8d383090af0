"""A kernel launched bound, for GPUs that are not here: prints how often it was compiled after each
launch. `python -m tests.kernels.bound_once`."""

import torch

from tests.kernels.stand_in import StandIn
from tests.kernels.test_launch import scaled


def main() -> None:
    driver, compiled = StandIn("sm_90"), []
    x = torch.zeros(65)

    def launch(*args: object, **how: object) -> None:
        scaled(*args, **how)
        compiled.append(len(driver.take()))

    launch(x[:64], None)
    launch(x[:64].clone(), None)  # the same again
    launch(x[:32], None)  # another integer
    launch(x[1:], None)  # not at 16 bytes
    launch(x[1:], None)
    launch(x[:64].double(), None)
    launch(x[:64], x[:64])
    launch(x[:64], None, scale=3)
    launch(x[:64], None, warps=2)
    launch(x[:64], None)
    print(*compiled)


if __name__ == "__main__":
    main()
