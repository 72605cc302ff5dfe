/* The release that this library belongs to; tests hold it against pyproject.toml. */
#ifndef NVS_VERSION
#define NVS_VERSION "0.2.0"
#endif
