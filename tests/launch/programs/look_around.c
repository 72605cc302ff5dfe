/* Says what a program that starts under nvshare-run finds, for any libc and any way of linking. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void)
{
    static char line[4096];
    const char *preload = getenv("LD_PRELOAD");
    int hooked = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        hooked |= strstr(line, "libnvshare_hook.so") != NULL;
    printf("%s %s\n", hooked ? "hooked" : "plain", preload != NULL ? preload : "-");
    return 0;
}
