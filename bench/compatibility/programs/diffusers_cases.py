"""Diffusers: image generators with random weights, made from configurations.

The UNet is that of Stable Diffusion XL, the DiT has the size that is asked for.  Prompts are random embeddings: text
encoders need a vocabulary from a hub.

Non-goals: anything of nvshare; images that show something.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from nvshare.bench.compatibility.cases.program import Outcome, Program, size_bytes
from nvshare.bench.compatibility.cases.torch_cases import host

GIB = 1 << 30
STEPS = 4
DIT_LAYER_BYTES = 340 << 20
"""One layer of the width below in half precision."""


def versions() -> dict[str, str]:
    """Versions for the record."""
    return {"diffusers": diffusers.__version__, "torch": torch.__version__}


def random_weights(make: Any, device: str) -> Any:
    """The model that `make` gives, half precision, on the device, the same every time."""
    torch.manual_seed(43)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def decoder(device: str) -> Any:
    """The VAE of Stable Diffusion, or a small one."""
    widths = (128, 256, 512, 512) if size_bytes() >= GIB else (32, 32)
    return random_weights(
        lambda: diffusers.AutoencoderKL(
            block_out_channels=widths, layers_per_block=2, latent_channels=4, sample_size=512,
            down_block_types=("DownEncoderBlock2D",) * len(widths), up_block_types=("UpDecoderBlock2D",) * len(widths),
        ), device,
    )  # fmt: skip


def unet_pipeline(device: str) -> tuple[Any, Any]:
    """A text-to-image pipeline, and the embedding of its prompt."""
    large = size_bytes() >= GIB
    context = 2048 if large else 32
    shape: dict[str, Any] = {
        "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20), "sample_size": 96,
    } if large else {
        "block_out_channels": (32, 64, 64), "transformer_layers_per_block": 1, "attention_head_dim": 8,
        "sample_size": 16,
    }  # fmt: skip
    unet = random_weights(
        lambda: diffusers.UNet2DConditionModel(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=context, use_linear_projection=True, layers_per_block=2, **shape,
        ), device,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=decoder(device), text_encoder=None, tokenizer=None, unet=unet,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    embedding = torch.randn(1, 77, context, generator=torch.Generator().manual_seed(47), dtype=torch.bfloat16)
    return pipeline, embedding


def unet_image(pipeline: Any, embedding: Any, seed: int, steps: int = STEPS) -> Any:
    """One image as a tensor."""
    # The device of a pipeline that offloads its models is where they are computed.
    prompt = embedding.to(pipeline._execution_device)
    images = pipeline(
        prompt_embeds=prompt, negative_prompt_embeds=torch.zeros_like(prompt), num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed), output_type="pt",
    ).images  # fmt: skip
    if not torch.isfinite(images).all():
        raise RuntimeError("the image has values that are no numbers")
    return images


def unet() -> Program:
    """A UNet on the card."""
    pipeline, embedding = unet_pipeline("cuda")
    return _images(lambda seed: unet_image(pipeline, embedding, seed))


def offloaded() -> Program:
    """Models that come to the card when they are used, and leave it, where free memory is less than they take.

    That decision by `mem_get_info` is ComfyUI's.
    """
    pipeline, embedding = unet_pipeline("cpu")
    free, _ = torch.cuda.mem_get_info()
    if free < 64 * GIB:
        pipeline.enable_model_cpu_offload()
    else:
        pipeline.to("cuda")
    return _images(lambda seed: unet_image(pipeline, embedding, seed))


def dit() -> Program:
    """A diffusion transformer on the card, by class labels."""
    large = size_bytes() >= GIB
    heads, width = (24, 128) if large else (2, 16)
    layers = max(2, round(0.75 * size_bytes() / DIT_LAYER_BYTES)) if large else 2
    transformer = random_weights(
        lambda: diffusers.DiTTransformer2DModel(
            num_attention_heads=heads, attention_head_dim=width, num_layers=layers, in_channels=4, out_channels=8,
            sample_size=64 if large else 16,
        ), "cuda",
    )  # fmt: skip
    pipeline = diffusers.DiTPipeline(transformer, decoder("cuda"), diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def image(seed: int) -> Any:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        images = pipeline([seed], num_inference_steps=STEPS, generator=generator, output_type="np").images
        return torch.from_numpy(images)

    return _images(image)


def _images(make: Any) -> Program:
    def check() -> Outcome:
        outcome = Outcome(1e-5)
        for seed in (1, 2, 3):
            outcome.bytes_of(host(make(seed)))
        return outcome

    return Program(check, None, torch.cuda.synchronize)


CASES = {"unet": unet, "offloaded": offloaded, "dit": dit}
