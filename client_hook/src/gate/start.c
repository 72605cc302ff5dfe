/* See start.h. */
#include "gate/start.h"

#include "base/config.h"
#include "gate/gate.h"

#include <errno.h>

void nvs_start(void)
{
    static atomic_flag begun = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set_explicit(&begun, memory_order_acq_rel)) /* constructors run one after the other */
        return;
    int saved = errno;
    nvs_gate_init();
    nvs_config_read();
    if (nvs_config.enabled)
        nvs_gate_arm();
    errno = saved;
}
