/* What other folders may use of this one. */
#ifndef NVS_MEMORY_H
#define NVS_MEMORY_H

#include "memory/allocate.h"
#include "memory/backends/mode.h"
#include "memory/moving.h"
#include "memory/quota/admission.h"
#include "memory/quota/deferred.h"
#include "memory/quota/quota.h"
#include "memory/records/entries.h"
#include "memory/release.h"

#endif
