/* Prints how much memory is left by the files under a directory; "unknown" when they do not say. */
#include "host/system.h"

#include <inttypes.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    const uint64_t left = argc == 2 ? nvs_host_left_in(argv[1]) : UINT64_MAX;
    if (left == UINT64_MAX)
        puts("unknown");
    else
        printf("%" PRIu64 "\n", left);
    return 0;
}
