/* See config.h. */
#define _GNU_SOURCE /* program_invocation_short_name, O_CLOEXEC, secure_getenv */
#include "base/config.h"

#include "base/log.h"
#include "base/msgpack.h"
#include "base/profile.gen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* The name of the script that an interpreter runs, for tools.  The command line comes from /proc, because the application may change its own copy. */

enum { KERNEL_NAME = 15 }; /* `kernel-` and eight digits */

/* The words of a command line, each with its terminator. */
struct words {
    const char *at;
    const char *end;
    char text[4096];
};

static bool read_words(struct words *words, pid_t process)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%ld/cmdline", (long)process);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    const ssize_t length = read(file, words->text, sizeof words->text - 1);
    close(file);
    if (length <= 0)
        return false;
    words->text[length] = 0;
    words->at = words->text;
    words->end = words->text + length;
    return true;
}

/* The next word; NULL after the last one. */
static const char *next(struct words *words)
{
    const char *word = words->at;
    if (word >= words->end)
        return NULL;
    words->at += strlen(word) + 1;
    return word;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL && slash[1] != 0 ? slash + 1 : path;
}

/* The command lines of interpreters, as far as they tell the program. */
typedef struct interpreter {
    const char *name;
    const char *letters;  /* short options with a value: `e:` attached or the next word, `M?` attached.  NULL: an option is a whole word */
    const char *code;     /* of these, the ones whose value is the program's text */
    const char *program;  /* of these, the ones whose value names the program */
    const char *longs;    /* options with their value in the next word, each between spaces */
    const char *commands; /* words that may precede the script, likewise */
} interpreter;

static const interpreter interpreters[] = {
    {"python", "c:m:W:X:", "c", "m", " --check-hash-based-pycs ", ""},
    {"pypy", "c:m:W:X:", "c", "m", " --check-hash-based-pycs ", ""},
    {"node", "e:p:r:C:", "ep", "", " --require --import --loader --experimental-loader --conditions ", " inspect "},
    {"nodejs", "e:p:r:C:", "ep", "", " --require --import --loader --experimental-loader --conditions ", " inspect "},
    {"deno", "c:L:", "", "", " --config --import-map --location --cert ", " run serve "},
    {"bun", "e:p:r:", "ep", "", " --preload --cwd --env-file --config ", " run "},
    {"ruby", "e:r:I:C:E:W?T?x?", "e", "", " --encoding ", ""},
    {"perl", "e:E:I:M?m?i?l?x?D?F?C?", "eE", "", "", ""},
    {"php", "r:f:d:c:S:t:z:B:R:F:E:", "rBRE", "fF", " --run --define --php-ini --server --docroot ", ""},
    {"R", "f:e:g:d:", "e", "f", " --gui --debugger --encoding ", ""}, /* Rscript becomes it */
    {"julia", "e:E:L:p:t:J:C:H:g?O?i?", "eE", "", " --load --procs --threads --sysimage --cpu-target --home ", ""},
    {"java", NULL, "", "", " -cp -classpath --class-path -p --module-path --add-modules --add-opens --add-exports ", ""},
    {"bash", "c:o:O:", "c", "", " --rcfile --init-file ", ""},
    {"sh", "c:o:", "c", "", "", ""},
};

/* By the program's name, which may end with a version.  NULL: it is none. */
static const interpreter *interpreter_of(const char *program)
{
    for (size_t i = 0; i < sizeof interpreters / sizeof *interpreters; i++) {
        const size_t length = strlen(interpreters[i].name);
        if (strncmp(program, interpreters[i].name, length) == 0 && (program[length] == 0 || strchr("0123456789.-", program[length]) != NULL))
            return &interpreters[i];
    }
    return NULL;
}

static bool is_among(const char *word, const char *list)
{
    const size_t length = strlen(word);
    for (const char *at = list; length != 0 && (at = strstr(at, word)) != NULL; at++)
        if (at != list && at[-1] == ' ' && at[length] == ' ')
            return true;
    return false;
}

/* The option that selects the program, or 0 for a script.  `value`: the code, program or script; NULL: none. */
static char find_value(const interpreter *of, struct words *words, const char **value)
{
    const char *word;
    bool first = true;
    while ((word = next(words)) != NULL && ((word[0] == '-' && word[1] != 0) || (first && is_among(word, of->commands)))) {
        first = first && word[0] == '-';
        if (strncmp(word, "--file=", 7) == 0) { /* R */
            *value = word + 7;
            return 0;
        }
        if (is_among(word, of->longs))
            next(words);
        if (word[0] != '-' || word[1] == '-' || of->letters == NULL)
            continue;
        const char *letter = word + 1, *known = NULL; /* options with a value may follow others: -um */
        while (*letter != 0 && ((known = strchr(of->letters, *letter)) == NULL || *letter == ':' || *letter == '?'))
            letter++;
        if (*letter == 0 || known[1] == '?')
            continue;
        *value = letter[1] != 0 ? letter + 1 : next(words);
        if (strchr(of->code, *letter) != NULL || strchr(of->program, *letter) != NULL)
            return *letter;
    }
    *value = word != NULL && word[0] != '-' ? word : NULL;
    return 0;
}

/* The notebook of a Jupyter kernel: its server names it in the environment.  Else the kernel, by its connection file. */
static const char *notebook(struct words *words, char kernel[KERNEL_NAME + 1])
{
    const char *name = getenv("JPY_SESSION_NAME");
    if (name != NULL && name[0] != 0)
        return base_name(name);
    const char *word;
    while ((word = next(words)) != NULL) {
        const char *file = base_name(word);
        if (strncmp(file, "kernel-", 7) == 0 && strstr(file, ".json") != NULL) {
            snprintf(kernel, KERNEL_NAME + 1, "%.*s", (int)(strcspn(file, ".")), file);
            return kernel;
        }
    }
    return "notebook";
}

/* The script's base name, Python's module of `-m`, the notebook of a Jupyter kernel (else `kernel-` and the beginning of its id), or `python -c`.
 * A process of Python's multiprocessing has its parent's name.  False: this is no interpreter, or it has no script. */
static bool script_name(char *out, size_t size)
{
    struct words words;
    const char *program, *name = NULL;
    char kernel[KERNEL_NAME + 1], inline_code[32];
    pid_t process = getpid();
    for (;;) {
        if (!read_words(&words, process) || (program = next(&words)) == NULL)
            return false;
        const interpreter *of = interpreter_of(base_name(program));
        if (of == NULL)
            return false;
        const char option = find_value(of, &words, &name);
        if (name == NULL)
            return false;
        if (option == 'c' && process == getpid() && strncmp(name, "from multiprocessing.", 21) == 0) {
            process = getppid();
            continue;
        }
        if (option != 0 && strchr(of->code, option) != NULL) {
            snprintf(inline_code, sizeof inline_code, "%s -%c", of->name, option);
            name = inline_code;
        } else if (option != 'm') {
            name = base_name(name);
        }
        break;
    }
    if (strncmp(name, "ipykernel", 9) == 0)
        name = notebook(&words, kernel);
    snprintf(out, size, "%s", name);
    return true;
}

nvs_settings nvs_config;

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"", 1},          {"B", 1},           {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40},
    {"KB", 1000},     {"MB", 1000000},    {"GB", 1000000000},  {"TB", 1000000000000}, {"K", 1ull << 10},
    {"M", 1ull << 20}, {"G", 1ull << 30}, {"T", 1ull << 40},   {NULL, 0},
};
static const struct unit time_units[] = {
    {"", 1000000000}, {"s", 1000000000}, {"ms", 1000000}, {"us", 1000}, {"ns", 1}, {"min", 60000000000},
    {"m", 60000000000}, {"h", 3600000000000}, {NULL, 0},
};

/* Parses a whole or decimal number with a unit.  False: malformed, or too large. */
static bool parse_quantity(const char *text, const struct unit *units, uint64_t *out)
{
    uint64_t whole = 0;
    double part = 0, scale = 0.1;
    const char *at = text;
    if (*at < '0' || *at > '9')
        return false;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (whole > (UINT64_MAX - 9) / 10)
            return false;
        whole = whole * 10 + (uint64_t)(*at - '0');
    }
    if (*at == '.')
        for (at++; *at >= '0' && *at <= '9'; at++, scale /= 10)
            part += scale * (*at - '0');
    while (*at == ' ')
        at++;
    for (; units->name != NULL; units++) {
        if (strcmp(at, units->name) != 0)
            continue;
        if (whole > (UINT64_MAX >> 1) / units->factor)
            return false;
        if (units->name[0] == 0 && units->factor == 1 && whole > 0 && whole < 1000000) /* a size that lacks its unit */
            return false;
        *out = whole * units->factor + (uint64_t)(part * (double)units->factor);
        return true;
    }
    return false;
}

static void copy_text(char *out, size_t size, const char *text)
{
    size_t length = strlen(text);
    if (length >= size)
        length = size - 1;
    memcpy(out, text, length);
    out[length] = 0;
    /* Cuts at a character boundary; replaces the bytes of invalid UTF-8. */
    while (length > 0 && !nvs_wire_text_valid((const uint8_t *)out, length) && length + 4 > size - 1)
        out[--length] = 0;
    for (size_t i = 0; i < length && !nvs_wire_text_valid((const uint8_t *)out, length); i++)
        if ((unsigned char)out[i] >= 0x80)
            out[i] = '?';
}

static int read_choice(const char *variable, const char *const *words, int preset)
{
    const char *text = secure_getenv(variable);
    if (text == NULL || text[0] == 0)
        return preset;
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(text, words[i]) == 0)
            return i;
    nvs_log(NVS_LOG_WARNING, "%s=%s is not known; using %s", variable, text, words[preset]);
    return preset;
}

static uint64_t read_quantity(const char *variable, const struct unit *units, const char *example, uint64_t preset)
{
    const char *text = secure_getenv(variable);
    uint64_t value;
    if (text == NULL || text[0] == 0)
        return preset;
    if (parse_quantity(text, units, &value))
        return value;
    nvs_log(NVS_LOG_WARNING, "%s=%s is not a quantity like %s; ignored", variable, text, example);
    return preset;
}

static int32_t read_number(const char *variable, int32_t low, int32_t high, int32_t preset)
{
    const char *text = secure_getenv(variable);
    char *end;
    if (text == NULL || text[0] == 0)
        return preset;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno == 0 && *end == 0 && value >= low && value <= high)
        return (int32_t)value;
    nvs_log(NVS_LOG_WARNING, "%s=%s is not a whole number from %d to %d; using %d", variable, text, low, high, preset);
    return preset;
}

static void read_text(const char *variable, char *out, size_t size)
{
    const char *text = secure_getenv(variable);
    size_t length = text != NULL ? strlen(text) : 0;
    if (length >= size || !nvs_wire_text_valid((const uint8_t *)text, length))
        nvs_log(NVS_LOG_WARNING, "%s is longer than %zu bytes or no UTF-8; ignored", variable, size - 1);
    else if (length > 0)
        memcpy(out, text, length + 1);
}

static void read_path(const char *variable, char *out, size_t size)
{
    const char *text = secure_getenv(variable);
    if (text == NULL)
        return;
    if (strlen(text) >= size)
        nvs_log(NVS_LOG_WARNING, "%s is longer than %zu bytes; ignored", variable, size - 1);
    else
        memcpy(out, text, strlen(text) + 1);
}

/* As text, which the coordinator reads. */
static void read_profile(void)
{
    static const struct {
        const char *word, *variable;
    } rows[] = {NVS_PROFILE_ROWS};
    size_t used = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *text = secure_getenv(rows[i].variable);
        if (text == NULL || text[0] == 0)
            continue;
        const size_t left = sizeof nvs_config.profile - used;
        const int size = snprintf(nvs_config.profile + used, left, "%s=%s\n", rows[i].word, text);
        if (size > 0 && (size_t)size < left && strchr(text, '\n') == NULL && nvs_wire_text_valid((const uint8_t *)text, strlen(text))) {
            used += (size_t)size;
            continue;
        }
        nvs_config.profile[used] = 0;
        nvs_log(NVS_LOG_WARNING, "%s is too long, or no line of UTF-8; ignored", rows[i].variable);
    }
}

void nvs_config_read(void)
{
    static const char *const levels[] = {"off", "error", "warning", "info", "debug", NULL};
    static const char *const modes[] = {"device", "managed", "swap", "auto", NULL}; /* in the order of nvs_mode */
    static const char *const losses[] = {"wait", "run", NULL};
    const char *mps = secure_getenv("NVSHARE_MPS");
    const char *disable = secure_getenv("NVSHARE_DISABLE");
    const char *name = secure_getenv("NVSHARE_NAME");
    char script[256];

    nvs_log_level = read_choice("NVSHARE_LOG", levels, NVS_LOG_WARNING);
    read_path("NVSHARE_SOCKET", nvs_config.socket, sizeof nvs_config.socket);
    const bool wanted = disable == NULL || disable[0] == 0 || strcmp(disable, "0") == 0;
    nvs_config.enabled = wanted && nvs_config.socket[0] != 0;
    nvs_config.stripped = wanted && secure_getenv("NVSHARE_SOCKET") == NULL;
    if (!nvs_config.enabled)
        return;
    if (name == NULL || name[0] == 0)
        name = script_name(script, sizeof script) ? script : program_invocation_short_name;
    copy_text(nvs_config.name, sizeof nvs_config.name, name);
    nvs_config.coordinator_user = read_number("NVSHARE_COORDINATOR_USER", -1, INT32_MAX, -1);
    read_profile();
    read_text("NVSHARE_PLACEMENT", nvs_config.placement, sizeof nvs_config.placement);
    nvs_config.memory_mode = (uint8_t)read_choice("NVSHARE_MEMORY", modes, NVS_MODE_AUTO);
    nvs_config.memory_auto = nvs_config.memory_mode == NVS_MODE_AUTO;
    nvs_config.memory_late = nvs_config.memory_auto || nvs_config.memory_mode == NVS_MODE_SWAP;
    nvs_config.memory_limit = read_quantity("NVSHARE_MEMORY_LIMIT", size_units, "4GiB", 0);
    nvs_config.host_limit = read_quantity("NVSHARE_HOST_LIMIT", size_units, "64GiB", 0);
    nvs_config.spatial = mps != NULL && strcmp(mps, "1") == 0;
    nvs_config.on_loss.run = read_choice("NVSHARE_ON_LOSS", losses, 0) == 1;
    nvs_config.on_loss.timeout_ns = read_quantity("NVSHARE_LOSS_TIMEOUT", time_units, "30s", 30000000000u);
}

/* Servers that run a remote program's calls, each connection in a process of its own. */
static const char *const remote_servers[] = {"lupine_driver_server"};
enum { MOST_DESCRIPTORS = 256 };

bool nvs_config_remote_peer(char *out, size_t size)
{
    bool serves = false;
    for (size_t i = 0; i < sizeof remote_servers / sizeof *remote_servers; i++)
        serves |= strcmp(program_invocation_short_name, remote_servers[i]) == 0;
    for (int descriptor = 0; serves && descriptor < MOST_DESCRIPTORS; descriptor++) {
        struct sockaddr_storage peer;
        socklen_t length = sizeof peer;
        if (getpeername(descriptor, (struct sockaddr *)&peer, &length) != 0)
            continue;
        const struct in6_addr *address = &((struct sockaddr_in6 *)&peer)->sin6_addr;
        if (peer.ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(address))
            return inet_ntop(AF_INET, &address->s6_addr[12], out, (socklen_t)size) != NULL;
        if (peer.ss_family == AF_INET6)
            return inet_ntop(AF_INET6, address, out, (socklen_t)size) != NULL;
        if (peer.ss_family == AF_INET)
            return inet_ntop(AF_INET, &((struct sockaddr_in *)&peer)->sin_addr, out, (socklen_t)size) != NULL;
    }
    return false;
}
