/* Opens a library (intercept_plugin.c) in many ways, and counts which of its calls pass the gate.
 *
 * intercept_open HOW LIBRARY: prints "calls N wrong M".  HOW: words of now, lazy, global, deepbind, closed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "nvshare.h"

static uint64_t gated(void)
{
    int (*state)(uint32_t, struct nvshare_gpu *);
    struct nvshare_gpu out = {.size = sizeof out};
    *(void **)&state = dlsym(RTLD_DEFAULT, "nvshare_gpu_state");
    return state != NULL && state(0, &out) == 0 ? out.calls : 0;
}

int main(int count, char **arguments)
{
    if (count < 3)
        return 2;
    const char *how = arguments[1];
    int mode = strstr(how, "lazy") != NULL ? RTLD_LAZY : RTLD_NOW, (*call)(void), wrong = 0;
    mode |= strstr(how, "global") != NULL ? RTLD_GLOBAL : RTLD_LOCAL;
    mode |= strstr(how, "deepbind") != NULL ? RTLD_DEEPBIND : 0;
    const int rounds = strstr(how, "closed") != NULL ? 3 : 1;
    const uint64_t before = gated();
    for (int i = 0; i < rounds; i++) {
        void *library = dlopen(arguments[2], mode);
        if (library == NULL) {
            printf("%s\n", dlerror());
            return 1;
        }
        *(void **)&call = dlsym(library, "plugin_call");
        wrong += call();
        if (rounds > 1)
            dlclose(library);
    }
    const char *left = dlerror();
    if (left != NULL)
        printf("left behind: %s\n", left);
    printf("calls %d wrong %d\n", (int)(gated() - before), wrong);
    return 0;
}
