/* Messages to the user. */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>

void nvs_sim_say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("simulated GPU: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}
