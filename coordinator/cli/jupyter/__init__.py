"""Notebooks: the magic `%gpu`, and the installation of kernels that share the GPU.

`nvshare.load_ipython_extension` loads `magic`; `nvshare-ctl kernelspec` is `kernelspec`.  Non-goals: waiting for the
GPU (the hook says it on standard error, which a kernel shows below the cell).
"""
