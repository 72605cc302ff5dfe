/* Two ends of swap/handdown.c, in one process and in two.  Prints the name of each check that held; ends with 1 at the first that did not. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "base/process/descriptor.h"
#include "swap/handdown.h"
#include "ipc/ipc.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GPU = 0 };
static const nvs_handoff HEIR = {7, 9}, NOBODY = {0, 0};
static const char UUID[] = "GPU-11111111-2222-3333-4444-555555555555";
#define MIB ((uint64_t)1 << 20)

#define CHECK(name, condition)                                  \
    do {                                                        \
        if (!(condition)) {                                     \
            fprintf(stderr, "%s: %s does not hold\n", name, #condition); \
            exit(1);                                            \
        }                                                       \
        puts(name);                                             \
    } while (0)

static int memory(const char *text)
{
    int fd = memfd_create("chunk", MFD_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text) + 1) < 0)
        exit(2);
    return fd;
}

static bool holds(int fd, const char *text)
{
    char found[64] = "";
    return fd >= 0 && pread(fd, found, sizeof found - 1, 0) > 0 && strcmp(found, text) == 0;
}

static int open_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = -1; /* the directory's own */
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(directory);
    return count;
}

static bool give(const char *text, uint64_t bytes)
{
    int fd = memory(text);
    bool given = nvs_bequest_give(GPU, bytes, fd);
    close(fd);
    return given;
}

static bool sockets_are_aside(void)
{
    int from = 0, sockets = 0;
    struct stat of;
    (void)nvs_descriptors_from(&from);
    for (int fd = 0; fd < from; fd++)
        if (fstat(fd, &of) == 0 && S_ISSOCK(of.st_mode))
            return false;
    for (int fd = from; fd < from + 16; fd++)
        sockets += fstat(fd, &of) == 0 && S_ISSOCK(of.st_mode);
    return sockets == 3;
}

static void simple(void)
{
    int before = open_descriptors();
    nvs_bequest_begin(GPU, UUID, HEIR);
    CHECK("nobody listens yet", !give("early", MIB));
    nvs_inheritance_begin(GPU, UUID, HEIR);
    CHECK("nothing has come", nvs_inheritance_take(GPU, MIB) == -1);
    CHECK("given once somebody listens", give("a", MIB) && give("b", 2 * MIB));
    nvs_inheritance_take(GPU, 4 * MIB);
    CHECK("sockets are out of the way of small numbers", sockets_are_aside());
    int two = nvs_inheritance_take(GPU, 2 * MIB), one = nvs_inheritance_take(GPU, MIB);
    CHECK("taken by size", holds(two, "b") && holds(one, "a"));
    CHECK("not inherited by a program that is started", (fcntl(one, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK("only once", nvs_inheritance_take(GPU, MIB) == -1);
    close(one);
    close(two);
    CHECK("nothing is left to drop", !nvs_inheritance_drop(GPU));
    CHECK("given but not wanted", give("c", 3 * MIB) && nvs_inheritance_take(GPU, MIB) == -1 && nvs_inheritance_drop(GPU));
    int found = -1;
    for (int i = 0; i < 50; i++) { /* more than are kept, of a size that nobody wants */
        (void)give("d", 3 * MIB);
        CHECK("not wanted", nvs_inheritance_take(GPU, MIB) == -1);
    }
    CHECK("what is wanted comes past what is not", give("e", MIB));
    for (int i = 0; i < 2 && found < 0; i++)
        found = nvs_inheritance_take(GPU, MIB);
    CHECK("and is found", holds(found, "e"));
    close(found);
    (void)give("f", MIB);
    nvs_bequest_end(GPU);
    nvs_inheritance_end(GPU);
    CHECK("no descriptor is left behind", open_descriptors() == before);
    nvs_inheritance_begin(GPU, UUID, HEIR);
    nvs_bequest_begin(GPU, UUID, HEIR);
    CHECK("once more with the same name", give("g", MIB) && holds(found = nvs_inheritance_take(GPU, MIB), "g"));
    close(found);
    nvs_bequest_end(GPU);
    nvs_bequest_begin(GPU, UUID, NOBODY);
    CHECK("no heir", !give("h", MIB));
    nvs_bequest_begin(GPU, "GPU-another", HEIR);
    CHECK("another GPU", !give("i", MIB));
    nvs_bequest_end(GPU);
    nvs_inheritance_end(GPU);
    nvs_inheritance_begin(GPU, UUID, NOBODY);
    CHECK("without a number from the coordinator nothing is begun", open_descriptors() == before);
}

static void another_token(void)
{
    nvs_handoff other = {HEIR.socket, HEIR.token + 1};
    const int before = open_descriptors();
    nvs_inheritance_begin(GPU, UUID, HEIR);
    nvs_bequest_begin(GPU, UUID, other);
    CHECK("sent with another token", give("t", MIB));
    CHECK("and not taken", nvs_inheritance_take(GPU, MIB) == -1 && !nvs_inheritance_drop(GPU));
    other = (nvs_handoff){HEIR.socket + 1, HEIR.token};
    nvs_bequest_begin(GPU, UUID, other);
    CHECK("another name reaches nobody", !give("u", MIB));
    nvs_bequest_end(GPU);
    nvs_inheritance_end(GPU);
    CHECK("no descriptor of a refused giver is left", open_descriptors() == before);
}

/* One message with two descriptors, as no hook sends it. */
static void two_descriptors(void)
{
    struct {
        uint64_t bytes, token;
        char gpu_uuid[96];
    } content = {MIB, HEIR.token, ""};
    uint64_t hash = UINT64_C(14695981039346656037);
    nvs_ipc_secret name;
    const int before = open_descriptors();
    for (const char *at = UUID; *at != 0; at++)
        hash = (hash ^ (uint8_t)*at) * UINT64_C(1099511628211);
    memcpy(name.bytes, &HEIR.socket, 8);
    memcpy(name.bytes + 8, &hash, 8);
    memcpy(content.gpu_uuid, UUID, sizeof UUID);
    nvs_inheritance_begin(GPU, UUID, HEIR);
    int giver = nvs_ipc_connect(&name, 0), both[2] = {memory("v"), memory("w")};
    CHECK("two at once are sent", giver >= 0 && nvs_ipc_send(giver, &content, sizeof content, both, 2, 0));
    nvs_ipc_close_all(both, 2);
    CHECK("and none is taken", nvs_inheritance_take(GPU, MIB) == -1);
    nvs_inheritance_end(GPU);
    close(giver);
    CHECK("nor left open", open_descriptors() == before);
}

/* The parent takes what its child gives, also after the child's death. */
static void between_processes(void)
{
    nvs_inheritance_begin(GPU, UUID, HEIR);
    pid_t child = fork();
    if (child == 0) {
        nvs_handdown_after_fork();
        nvs_bequest_begin(GPU, UUID, HEIR);
        _exit(give("from the child", MIB) ? 0 : 1);
    }
    int status = 1;
    CHECK("given by another process", waitpid(child, &status, 0) == child && status == 0);
    int fd = nvs_inheritance_take(GPU, MIB);
    CHECK("its memory outlives it", holds(fd, "from the child"));
    close(fd);
    nvs_inheritance_end(GPU);
}

/* Another user's program may not give, nor get.  Needs root; the caller has looked. */
static void another_user(void)
{
    nvs_inheritance_begin(GPU, UUID, HEIR);
    pid_t child = fork();
    if (child == 0) {
        nvs_handdown_after_fork();
        nvs_bequest_begin(GPU, UUID, HEIR);
        _exit(seteuid(65534) == 0 && !give("stolen", MIB) ? 0 : 1);
    }
    int status = 1;
    CHECK("another user gets no connection", waitpid(child, &status, 0) == child && status == 0);
    CHECK("and gives nothing", nvs_inheritance_take(GPU, MIB) == -1);
    nvs_inheritance_end(GPU);
}

static void kept(void)
{
    struct rlimit limit = {64, 64};
    setrlimit(RLIMIT_NOFILE, &limit);
    int descriptors[64], count = 0;
    while (count < 64 && (descriptors[count] = nvs_descriptor_keep(memory("k"))) >= 0)
        count++;
    CHECK("a quarter of the limit is kept", count == 16);
    CHECK("out of the way of small numbers", descriptors[0] >= 48);
    int small = memory("s");
    CHECK("which the application still gets", small >= 0 && small < 48);
    close(small);
    nvs_descriptor_drop(descriptors[--count]);
    nvs_descriptor_drop(-1);
    CHECK("one dropped makes room for one", (descriptors[count] = nvs_descriptor_keep(memory("k"))) >= 0);
    count++;
    CHECK("and no more", nvs_descriptor_keep(memory("k")) == -1);
    while (count > 0)
        nvs_descriptor_drop(descriptors[--count]);
}

uint64_t nvs_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int main(void)
{
    between_processes();
    if (geteuid() == 0)
        another_user();
    simple();
    another_token();
    two_descriptors();
    kept();
    return 0;
}
