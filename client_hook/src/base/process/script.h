/* The name of the script that a Python interpreter runs, for tools. */
#ifndef NVS_SCRIPT_H
#define NVS_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>

/* The script's base name, the module of `-m`, the notebook of a Jupyter kernel (else `kernel-` and the beginning of its id), or `python -c`.
 * A process of Python's multiprocessing has its parent's name.  False: this is no Python interpreter, or it has no script. */
bool nvs_script_name(char *out, size_t size);

#endif
