/* See hot.h. */
#include "base/hot.h"

nvs_hot_page nvs_hot = {.only_gpu = NVS_NO_GPU};
