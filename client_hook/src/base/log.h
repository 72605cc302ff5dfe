/* Logging to stderr (or NVSHARE_LOG_FILE): NVSHARE_LOG=off|error|warning|info|debug, `warning` by default. */
#ifndef NVS_LOG_H
#define NVS_LOG_H

#include <stdatomic.h>

enum { NVS_LOG_OFF, NVS_LOG_ERROR, NVS_LOG_WARNING, NVS_LOG_INFO, NVS_LOG_DEBUG };
extern int nvs_log_level;

/* The process ends.  Errors of the driver no longer matter, so warnings stop, unless NVSHARE_LOG asks for more than `warning`. */
void nvs_log_ending(void);

void nvs_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A line for the user, always on standard error; dropped if that is closed or full.  NVSHARE_LOG=error silences it.
 * For the hook's own threads, which block all signals. */
void nvs_log_notice(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define NVS_LOG_ONCE(level, ...)                                                   \
    do {                                                                           \
        static atomic_flag said = ATOMIC_FLAG_INIT;                                \
        if (!atomic_flag_test_and_set_explicit(&said, memory_order_relaxed))       \
            nvs_log((level), __VA_ARGS__);                                         \
    } while (0)

#endif
