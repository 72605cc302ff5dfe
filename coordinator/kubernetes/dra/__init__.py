"""The DRA driver `gpu.nvshare.com`: publishes GPUs whose memory and compute claims share, and makes slots of claims."""
