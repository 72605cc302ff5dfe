/* See script.h.  The command line comes from /proc, because the application may change its own copy. */
#define _GNU_SOURCE /* O_CLOEXEC */
#include "base/process/script.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* The interpreter's option that selects its program: 'm', 'c', or 0 for a script.  `value`: the module, code or script; NULL: none. */
static char find_value(struct words *words, const char **value)
{
    const char *word;
    while ((word = next(words)) != NULL && word[0] == '-' && word[1] != 0) {
        if (word[1] == '-') {
            if (strcmp(word, "--check-hash-based-pycs") == 0)
                next(words);
            continue;
        }
        const char *letter = word + 1 + strcspn(word + 1, "cmWX"); /* the options with a value, which may follow others: -um */
        if (*letter == 0)
            continue;
        *value = letter[1] != 0 ? letter + 1 : next(words);
        if (*letter == 'c' || *letter == 'm')
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

bool nvs_script_name(char *out, size_t size)
{
    struct words words;
    const char *program, *name = NULL;
    char kernel[KERNEL_NAME + 1];
    pid_t process = getpid();
    for (;;) {
        if (!read_words(&words, process) || (program = next(&words)) == NULL)
            return false;
        program = base_name(program);
        if (strncmp(program, "python", 6) != 0 && strncmp(program, "pypy", 4) != 0)
            return false;
        const char option = find_value(&words, &name);
        if (name == NULL)
            return false;
        if (option == 'c' && process == getpid() && strncmp(name, "from multiprocessing.", 21) == 0) {
            process = getppid();
            continue;
        }
        if (option == 'c')
            name = "python -c";
        else if (option == 0)
            name = base_name(name);
        break;
    }
    if (strncmp(name, "ipykernel", 9) == 0)
        name = notebook(&words, kernel);
    snprintf(out, size, "%s", name);
    return true;
}
