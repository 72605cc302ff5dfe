/* Runs each file that is named once: what a fuzzer's own main does, for compilers without one. */
#include "fuzz.h"

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        MUST(file != NULL && fseek(file, 0, SEEK_END) == 0);
        const long size = ftell(file);
        MUST(size >= 0);
        rewind(file);
        uint8_t *data = malloc(size != 0 ? (size_t)size : 1); /* of its exact size: a sanitizer sees what reads beyond */
        MUST(data != NULL && fread(data, 1, (size_t)size, file) == (size_t)size);
        (void)fclose(file);
        (void)LLVMFuzzerTestOneInput(data, (size_t)size);
        free(data);
    }
    return 0;
}
