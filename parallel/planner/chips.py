"""Accelerators that plans support, with figures from the manufacturers' data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """An accelerator and its interconnect.

    Attributes:
      platform: JAX's platform name: "gpu" or "tpu".
      flops: dense bf16 FLOP/s.
      memory: HBM in bytes (a data sheet's GB is 1e9).
      bandwidth: HBM bandwidth in bytes/s.
      near: devices connected by fast links: a host's GPUs, a TPU slice.
      link: bytes/s that a device sends over fast links in one collective, in one direction.
      network: the same to all other devices: its share of the host's network cards.
    """

    platform: str
    flops: float
    memory: float
    bandwidth: float
    near: int
    link: float
    network: float


def named(kind: str) -> str | None:
    """The name in `CHIPS` of a device with JAX's device_kind `kind`; None if it has none."""
    return next((name for words, name in KINDS.items() if words in kind), None)


# What JAX's device_kind of each contains.
KINDS = {
    "A100": "a100", "H100": "h100", "H200": "h200", "B200": "b200", "B300": "b300", "MI300": "mi300", "TPU v4": "v4",
    "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6": "v6e",
}  # fmt: skip
CHIPS = {
    # NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s with sparsity, so half of that dense; 80 GB, 3.35 TB/s; NVLink 900 GB/s
    # bidirectional. DGX H100: 8 GPUs, each with a ConnectX-7 of 400 Gb/s.
    "h100": Chip("gpu", 989.5e12, 80e9, 3.35e12, 8, 450e9, 50e9),
    # NVIDIA H200 data sheet, SXM: the same compute and links, 141 GB, 4.8 TB/s. DGX H200: as DGX H100.
    "h200": Chip("gpu", 989.5e12, 141e9, 4.8e12, 8, 450e9, 50e9),
    # NVIDIA DGX B200 data sheet and user guide: 8 GPUs, 1,440 GB, 64 TB/s, NVLink 14.4 TB/s bidirectional,
    # 8 ConnectX-7 of 400 Gb/s. HGX B200: 36 PFLOP/s of bf16 with sparsity for 8, so 2.25 dense each.
    "b200": Chip("gpu", 2250e12, 180e9, 8.0e12, 8, 900e9, 50e9),
    # NVIDIA HGX B300: as HGX B200 in bf16, NVLink and 8 TB/s; 288 GB each, 8 ConnectX-8 of 800 Gb/s.
    "b300": Chip("gpu", 2250e12, 288e9, 8.0e12, 8, 900e9, 100e9),
    # NVIDIA A100 data sheet, SXM 80 GB: 312 TFLOP/s, 2,039 GB/s; NVLink 600 GB/s bidirectional. DGX A100: 8 GPUs, each
    # with a ConnectX-6 of 200 Gb/s.
    "a100": Chip("gpu", 312e12, 80e9, 2.039e12, 8, 300e9, 25e9),
    # AMD Instinct MI300X data sheet: 1,307 TFLOP/s, 192 GB, 5.3 TB/s; 8 GPUs, each pair with a link of 128 GB/s
    # bidirectional, so 7 x 64 GB/s in one direction. Networks differ; here 400 Gb/s each.
    "mi300": Chip("gpu", 1307e12, 192e9, 5.3e12, 8, 448e9, 50e9),
    # Google Cloud "TPU v5p": 459 TFLOP/s, 95 GB, 2,765 GB/s, 4,800 Gb/s over 6 links of a 3D torus, of which a
    # collective along one mesh axis uses 2; slices of up to 6,144 chips. 200 Gb/s per host of 4 chips.
    "v5p": Chip("tpu", 459e12, 95e9, 2.765e12, 6144, 200e9, 6.25e9),
    # Google Cloud "TPU v6e": 918 TFLOP/s, 32 GB, 1,600 GB/s, 800 GB/s bidirectional over 4 links of a 2D torus, of
    # which a collective along one mesh axis uses 2; slices of up to 256 chips. 4 x 200 Gb/s per host of 8 chips.
    "v6e": Chip("tpu", 918e12, 32e9, 1.6e12, 256, 200e9, 12.5e9),
    # Google Cloud "TPU v5e": 197 TFLOP/s, 16 GB, 819 GB/s, 400 GB/s bidirectional over 4 links of a 2D torus, of which
    # a collective along one mesh axis uses 2; slices of up to 256 chips. 2 x 100 Gb/s per host of 8 chips.
    "v5e": Chip("tpu", 197e12, 16e9, 0.819e12, 256, 100e9, 3.125e9),
    # Google Cloud "TPU v4": 275 TFLOP/s, 32 GiB, 1,200 GB/s; 6 links of 50 GB/s each way, of which a collective along
    # one mesh axis uses 2; slices of up to 4,096 chips. The network of its hosts is not published; here that of v5p.
    "v4": Chip("tpu", 275e12, 34.36e9, 1.2e12, 4096, 100e9, 6.25e9),
}
