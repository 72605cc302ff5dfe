/* The answers to cuGetProcAddress and dlsym, for any name, version and flags and any address that a driver may give.
 *
 * Each row of the table has a wrapper and a real function at addresses of their own here.  Nothing that the table gates is ever
 * answered with the driver's own address, and nothing is answered with a function of another name.
 */
#include "fuzz.h"

#include "driver/cuda_api.c" /* the hook's: the table and what is made of it */

/* The wrappers: one address each. */
#define AT(symbol) __asm__(".pushsection .text\n.globl " #symbol "\n" #symbol ": ret\n.popsection");
#define NVS_STREAM(symbol, since, parameters, arguments, stream) AT(symbol)
#define NVS_CURRENT(symbol, since, parameters, arguments) AT(symbol)
#define NVS_CUSTOM(symbol, since) AT(symbol)
#define NVS_PASS(symbol, since, reason)
#define NVS_THUNK(symbol, since, reason)
#define NVS_FOREIGN(symbol, since, reason)
#include "driver/cuda_api.def"

static char reals[NVS_ID_COUNT + 1], thunks[NVS_ID_COUNT + 1], stranger;
nvs_hot_page nvs_hot;

bool nvs_driver_loaded(void)
{
    return true;
}

/* A driver that lacks every seventh function. */
void *nvs_driver_symbol(const char *name)
{
    const nvs_id id = nvs_id_of_name(name);
    return id == NVS_ID_COUNT || id % 7 == 6 ? NULL : &reals[id];
}

static void *thunk_for(const char *name, void *target)
{
    MUST(name != NULL);
    const uintptr_t at = (uintptr_t)target - (uintptr_t)reals;
    return at < sizeof reals ? &thunks[at] : target;
}

void *(*const nvs_thunk_for)(const char *name, void *target) = thunk_for;

static const char *const suffixes[] = {"", "_v2", "_v3", "_ptsz", "_ptds", "_v2_ptsz", "_v2_ptds", "_v3_ptsz"};

/* The name: a row's own, one without its end or with another end, or the rest of the input. */
static void choose_name(const uint8_t *data, size_t size, char *name, size_t capacity)
{
    const unsigned row = (unsigned)(data[0] | data[1] << 8) % NVS_ID_COUNT, cut = data[2] % 16;
    const size_t rest = size - 12 < capacity - 1 ? size - 12 : capacity - 1;
    memcpy(name, data + 12, rest);
    name[rest] = '\0';
    if ((data[3] & 1) != 0)
        return;
    const size_t length = strlen(nvs_entries[row].name), kept = cut < length ? length - cut : length;
    snprintf(name, capacity, "%.*s%s", (int)kept, nvs_entries[row].name, suffixes[data[3] >> 1 & 7]);
}

static bool wrapper_of(const void *address, unsigned *row)
{
    for (*row = 0; *row < NVS_ID_COUNT; ++*row)
        if (nvs_entries[*row].wrapper != NULL && nvs_as_address(nvs_entries[*row].wrapper) == address)
            return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char name[256];
    int version;
    unsigned row;
    if (size < 12)
        return 0;
    choose_name(data, size, name, sizeof name);
    memcpy(&version, data + 4, sizeof version);
    const unsigned given = (unsigned)(data[8] | data[9] << 8);
    void *address = given == 0xffff ? (void *)&stranger : (void *)&reals[given % NVS_ID_COUNT];
    memset((void *)nvs_reals, 0, sizeof nvs_reals); /* what the last input made known */
    memset((void *)nvs_hot.reals, 0, sizeof nvs_hot.reals);
    void *answer = nvs_translate(name, address, version, data[10]);
    MUST(answer != NULL);
    if (wrapper_of(answer, &row))
        MUST(strncmp(nvs_entries[row].name, name, strlen(name)) == 0);
    else
        MUST(answer == address || answer == nvs_thunk_for(name, address));
    /* An address that no driver exports: version and flags say which row is meant. */
    const bool per_thread = (data[10] & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    const nvs_id meant = by_version(name, version, per_thread);
    MUST(address != &stranger || meant == NVS_ID_COUNT || nvs_entries[meant].wrapper == NULL || answer != address);
    /* The driver's own answer to a name of the table, asked as dlsym asks. */
    const nvs_id id = nvs_id_of_name(name);
    void *real = nvs_driver_symbol(name);
    if (id != NVS_ID_COUNT && real != NULL && nvs_is_gated(&nvs_entries[id])) {
        MUST(nvs_translate_symbol(id, name, real) != real);
        MUST(nvs_translate(name, real, version, data[10]) != real);
    }
    return 0;
}
