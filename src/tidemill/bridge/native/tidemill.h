/* tidemill.h: the simulator's end of Tidemill's bridge, in one header, for C99. Nothing beyond libc and libm (link with -lm).
 *
 * In exactly one source file, before any other include:
 *
 *     #define TIDEMILL_IMPLEMENTATION
 *     #include "tidemill.h"
 *
 * A simulator:
 *
 *     tm_bridge *bridge = tm_bridge_open(argc, argv);               // finds --memory-path; without it nobody trains: heuristics act
 *     tm_world *world = tm_world_create(bridge, &(tm_world_spec){
 *         .name = "reach", .max_agents = 10, .observations = (tm_observation[]){{.shape = {4}}}, .observation_count = 1, .continuous = 2});
 *     for (;;) {
 *         tm_request request = tm_request_decision(world, agent_id);  // from any thread
 *         tm_set_reward(request, reward);
 *         tm_set_observation(request, 0, values, 4);
 *         int status = tm_exchange(bridge);                         // hands over the turn, waits for actions
 *         if (status == TM_RESET) ...begin anew...                  // what was requested is dropped; no actions
 *         if (status == TM_CLOSED || status < 0) break;             // < 0: tm_error() says what, why, and what to do
 *         for (int32_t i = 0; i < tm_action_count(world); i++) { tm_action action = tm_action_at(world, i); ... }
 *     }
 *     tm_bridge_close(bridge);
 *
 * What may run at the same time: tm_request_decision, tm_end_episode, tm_interrupt_episode, the setters of a request (each request from one
 * thread), and what sends on side channels. Everything else, tm_exchange above all, is called while none of these run. With a compiler that
 * has no __atomic builtins, or where TM_ONE_THREAD is defined (TM_ATOMIC is 0 then), all calls must come from one thread.
 *
 * Systems: POSIX, little-endian. On Linux both ends sleep on a futex; elsewhere, or where TM_NO_FUTEX is defined, this end naps (50 µs to 1 ms).
 * Not for Windows.
 */
#ifndef TIDEMILL_H
#define TIDEMILL_H

#if defined(TIDEMILL_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1 /* syscall, flock, O_NOFOLLOW; takes effect when this is the first include */
#endif

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* BEGIN GENERATED */
/* by `python -m tidemill.bridge.protocol.generate` from src/tidemill/bridge/protocol/tables.py */
#define TM_TURN_TRAINER 0
#define TM_TURN_SIMULATOR 1
#define TM_COMMAND_STEP 0
#define TM_COMMAND_RESET 1
#define TM_COMMAND_CHANGE_FILE 2
#define TM_COMMAND_CLOSE 3
#define TM_NAME_SIZE 64
#define TM_MAX_NAME 63
#define TM0_FILE_LENGTH 0
#define TM0_VERSION 4
#define TM0_TURN 8
#define TM0_COMMAND 9
#define TM0_SIDE_CAPACITY 10
#define TM0_SIDE_BASE 14
#define TM0_SIDE_LENGTH 14
#define TM0_SIDE_DATA 18
#define TM0_HEADER_SIZE 22
#define TM0_EMPTY_SIZE 22
#define TM3_MAJOR 0
#define TM3_MINOR 4
#define TM3_BUG 8
#define TM3_SIMULATOR_BLOCKED 12
#define TM3_TRAINER_BLOCKED 13
#define TM3_RESET 14
#define TM3_CLOSED 15
#define TM3_BODY_NUMBER 16
#define TM3_SIDE_BYTES 20
#define TM3_RL_BYTES 24
#define TM3_QUERY 28
#define TM3_HEADER_SIZE_0 28
#define TM3_HEADER_SIZE_2 29
#define TM_DIGEST_0 "b08a2094"
#define TM_DIGEST_0_3_0 "804e0ed8"
#define TM_DIGEST_0_3_2 "e0c41017"
/* END GENERATED */

/* What calls return: 0 or more is good, less is an error that tm_error() describes. */
enum {
    TM_OK = 0,               /* tm_exchange: the actions have come */
    TM_IDLE = 1,             /* tm_exchange: nobody had requested anything, so there was no exchange */
    TM_RESET = 2,            /* tm_exchange: the trainer asks to begin anew; requests were dropped, there are no actions */
    TM_CLOSED = 3,           /* tm_exchange: the trainer has closed the bridge */
    TM_ERROR_USAGE = -1,     /* a call or an argument that makes no sense */
    TM_ERROR_CAPACITY = -2,  /* more requests than max_agents, or a file that cannot grow any more */
    TM_ERROR_MEMORY = -3,    /* malloc found no memory */
    TM_ERROR_FILE = -4,      /* the system refused something about the memory file */
    TM_ERROR_VERSION = -5,   /* the trainer speaks a layout that this header does not know */
    TM_ERROR_TRAINER = -6,   /* the trainer wrote what it must not: a length, an offset, an action out of bounds */
    TM_ERROR_DIED = -7,      /* the trainer's process is gone */
    TM_ERROR_DEADLINE = -8   /* the trainer thought for longer than tm_options.deadline_seconds; call tm_exchange again to wait on */
};

typedef struct tm_bridge tm_bridge;
typedef struct tm_world tm_world;

/* The newest error of the calling thread, in words. */
const char *tm_error(void);

/* ---------------------------------------------------------------------------------------------------------------- bridge */

enum { TM_FRAMING_UUID = 0, TM_FRAMING_TYPE = 1 }; /* how side-channel messages are told apart; both ends must choose alike */

typedef struct tm_options {
    const char *path;        /* memory file: from /, or in <temporary directory>/ml-agents/; NULL: the editor's, if a trainer waits there, else no trainer */
    int started;             /* 1: the trainer started this process, so that its parent's death is the trainer's (tm_options_from knows) */
    int framing;             /* TM_FRAMING_UUID or the older TM_FRAMING_TYPE */
    double deadline_seconds; /* how long tm_exchange waits at most; 0: as long as the trainer lives */
} tm_options;

/* The bridge to the trainer named by `--memory-path PATH` among the arguments; without that to the one that waits for an editor (a file "default" in
 * <temporary directory>/ml-agents/); else one without a trainer. NULL: error. */
tm_bridge *tm_bridge_open(int argc, char **argv);
tm_bridge *tm_bridge_open_with(const tm_options *options);

/* The options that the arguments ask for, to be changed before tm_bridge_open_with. `path` points into argv. */
tm_options tm_options_from(int argc, char **argv);

/* Tells the trainer that the simulator ends, and frees the bridge with all of its worlds. NULL does nothing. */
void tm_bridge_close(tm_bridge *bridge);

/* 1 if a trainer is at the other end, 0 if heuristics act. */
int tm_bridge_has_trainer(const tm_bridge *bridge);

/* Called when the trainer resets, before tm_exchange returns TM_RESET. */
void tm_on_reset(tm_bridge *bridge, void (*callback)(tm_bridge *bridge, void *user), void *user);

/* Hands what was requested over to the trainer (without one: to the heuristics) and waits for the actions. Without any request it returns TM_IDLE at
 * once, and the trainer goes on waiting; only its very first step is answered then, too, by worlds without agents, so that its reset can come. */
int tm_exchange(tm_bridge *bridge);

/* ----------------------------------------------------------------------------------------------------------------- worlds */

typedef struct tm_observation {
    int32_t shape[3];      /* unused dimensions last and 0: a vector of 4 is {4} */
    int32_t properties[3]; /* what each dimension means, and what kind of observation it is: only layout 0.3.2 carries them */
    int32_t type;
} tm_observation;

typedef struct tm_world_spec {
    const char *name;                    /* 1 to 63 ASCII characters; one world per name */
    int32_t max_agents;                  /* requests of one exchange at most, and as many ends; in layout 0 both together */
    const tm_observation *observations;
    int32_t observation_count;
    int32_t continuous;                  /* continuous actions (floats) of an agent */
    const int32_t *branches;             /* number of choices of each discrete action */
    int32_t branch_count;                /* both kinds of actions in one world: layout 0.3.2, or no trainer */
} tm_world_spec;

/* A world (agent group) of the bridge. Everything in the spec is copied. NULL: error. Worlds live as long as the bridge. */
tm_world *tm_world_create(tm_bridge *bridge, const tm_world_spec *spec);
tm_world *tm_world_find(tm_bridge *bridge, const char *name); /* NULL: there is none of that name */
const char *tm_world_name(const tm_world *world);

/* An agent's row in the next exchange. Until set, its reward and observations are 0 and nothing is forbidden. `row` < 0: the request was refused
 * (tm_error); setting anything of it fails, and so does the next exchange: errors of requests and setters that nobody looked at are never lost. */
typedef struct tm_request {
    tm_world *world;
    int32_t row;
    int32_t ended;
} tm_request;

tm_request tm_request_decision(tm_world *world, int32_t agent_id);
tm_request tm_end_episode(tm_world *world, int32_t agent_id);       /* the episode came to its end; set final reward and observations */
tm_request tm_interrupt_episode(tm_world *world, int32_t agent_id); /* it was cut short (a time limit); set them likewise */

int tm_set_reward(tm_request request, float reward);
/* All `count` values (product of the shape, C order) of observation k, copied as one block. */
int tm_set_observation(tm_request request, int32_t k, const float *values, size_t count);
/* The same from values written out: tm_set_observation_values(request, 0, x, y, z). */
#define tm_set_observation_values(request, k, ...) \
    tm_set_observation((request), (k), (const float[]){__VA_ARGS__}, sizeof((const float[]){__VA_ARGS__}) / sizeof(float))
/* Which choices of a branch are forbidden: `count` bytes, 1 = forbidden; count is the branch's size. */
int tm_set_action_mask(tm_request request, int32_t branch, const uint8_t *forbidden, size_t count);

/* An agent's action. The arrays live until the next tm_exchange; requests may be made while they are read. */
typedef struct tm_action {
    int32_t agent_id;
    const float *continuous;
    const int32_t *discrete;
} tm_action;

int32_t tm_action_count(const tm_world *world); /* actions of the newest exchange, one per decision requested */
tm_action tm_action_at(const tm_world *world, int32_t i);
/* Called for each action before tm_exchange returns TM_OK ("actuator"). */
void tm_on_action(tm_world *world, void (*callback)(tm_world *world, tm_action action, void *user), void *user);

/* What a heuristic sees. */
typedef struct tm_decision {
    int32_t agent_id;
    float reward;
    const float *const *observations;
    const uint8_t *forbidden; /* all branches side by side, 1 = forbidden */
} tm_decision;

/* Acts where there is no trainer: fills the arrays, which begin as zeros. A world without one gets zeros. */
void tm_set_heuristic(tm_world *world, void (*heuristic)(const tm_decision *decision, float *continuous, int32_t *discrete, void *user), void *user);

/* ---------------------------------------------------------------------------------------------------------- side channels */

typedef struct tm_channel {
    uint8_t uuid[16]; /* in .NET byte order (Guid.ToByteArray) */
    int32_t type;     /* under the older framing */
} tm_channel;

extern const tm_channel tm_engine_channel;
extern const tm_channel tm_parameter_channel;
extern const tm_channel tm_statistic_channel;
extern const tm_channel tm_property_channel;

/* Bytes to the trainer, with the next exchange. Any thread. */
int tm_send(tm_bridge *bridge, const tm_channel *channel, const void *bytes, size_t count);
/* Called for each message on the channel, within tm_exchange and before on_reset. Messages that nobody listens to are skipped. */
int tm_listen(tm_bridge *bridge, const tm_channel *channel, void (*callback)(const uint8_t *bytes, size_t count, void *user), void *user);

/* Settings of the engine, as far as the trainer has sent them (`set` has the bits). */
enum { TM_ENGINE_RESOLUTION = 1, TM_ENGINE_QUALITY = 2, TM_ENGINE_TIME_SCALE = 4, TM_ENGINE_FRAME_RATE = 8, TM_ENGINE_CAPTURE_RATE = 16 };
typedef struct tm_engine {
    int set;
    int32_t width, height, quality;
    float time_scale;
    int32_t target_frame_rate, capture_frame_rate;
} tm_engine;
tm_engine tm_engine_settings(const tm_bridge *bridge);
void tm_on_engine(tm_bridge *bridge, void (*callback)(tm_engine settings, void *user), void *user);

/* The environment parameter `key`: its value, a draw if the trainer has sent a sampler, else `otherwise`. Main thread (a draw moves a sampler on). */
float tm_parameter(tm_bridge *bridge, const char *key, float otherwise);

/* A number for the run's metrics, with the next exchange. Any thread. */
enum { TM_AVERAGE = 0, TM_MOST_RECENT = 1, TM_SUM = 2 };
int tm_statistic(tm_bridge *bridge, const char *key, float value, int how);

/* Float properties: shared by both ends; setting one tells the trainer. */
float tm_property(const tm_bridge *bridge, const char *key, float otherwise);
int tm_set_property(tm_bridge *bridge, const char *key, float value);

#ifdef __cplusplus
}
#endif

#endif /* TIDEMILL_H */

/* ======================================================================================================= implementation */
#ifdef TIDEMILL_IMPLEMENTATION
#ifndef TIDEMILL_IMPLEMENTED
#define TIDEMILL_IMPLEMENTED

#if defined(_WIN32)
#error "tidemill.h needs a POSIX system (Linux, macOS); under Windows use the C# package or WSL"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tidemill.h: the memory layout is little-endian, and so must the machine be"
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__) && !defined(TM_NO_FUTEX)
#include <sys/syscall.h>
#define TM__FUTEX 1
#else
#define TM__FUTEX 0
#endif

#if !defined(O_NOFOLLOW) || !defined(O_CLOEXEC)
#error "the file that defines TIDEMILL_IMPLEMENTATION must include tidemill.h before anything else, or be compiled with -D_GNU_SOURCE"
#endif

/* --------------------------------------------------------------------------------------------------------------- atomics */

#if (defined(__GNUC__) || defined(__clang__)) && !defined(TM_ONE_THREAD)
#define TM_ATOMIC 1
#define TM__THREAD __thread
#define tm__add(address) __atomic_fetch_add((address), 1, __ATOMIC_RELAXED)
#define tm__load(address) __atomic_load_n((address), __ATOMIC_ACQUIRE)
#define tm__store(address, value) __atomic_store_n((address), (value), __ATOMIC_RELEASE)
#define tm__lock(address) \
    while (__atomic_exchange_n((address), 1, __ATOMIC_ACQUIRE)) sched_yield()
#define tm__unlock(address) __atomic_store_n((address), 0, __ATOMIC_RELEASE)
#else /* one thread only; the order in memory is that of volatile accesses, which x86-64 keeps */
#define TM_ATOMIC 0
#define TM__THREAD
#define tm__add(address) ((*(address))++)
#define tm__load(address) (*(volatile uint32_t *)(address))
#define tm__store(address, value) (*(volatile uint8_t *)(address) = (value))
#define tm__lock(address) (void)(address)
#define tm__unlock(address) (void)(address)
#endif

/* ------------------------------------------------------------------------------------------------------------ structures */

enum { TM__NOBODY = -100 }; /* no editor's trainer waits */
enum { TM__ALONE = -1, TM__LAYOUT_0 = 0, TM__LAYOUT_30 = 30, TM__LAYOUT_32 = 32 };
enum { TM__FIRST, TM__MINE, TM__THEIRS }; /* waiting for the trainer's first command, or the one after no agents; our turn; handed over */

typedef struct tm__map {
    uint8_t *at;
    size_t size;
    dev_t device;
    ino_t inode;
} tm__map;

typedef struct tm__listener {
    tm_channel channel;
    void (*callback)(const uint8_t *, size_t, void *);
    void *user;
    struct tm__listener *next;
} tm__listener;

typedef struct tm__value { /* an environment parameter or a float property */
    char *key;
    int sampler; /* -1: the value itself; 0 uniform, 1 gaussian, 2 multi-range */
    float value, first, second;
    float *ranges;
    int32_t range_count; /* pairs */
    uint32_t random;
    struct tm__value *next;
} tm__value;

/* A group lies in memory as its spec, then its data. Offsets are relative to the data and follow from the spec and the layout alone: nothing
 * that the trainer writes is ever used as one. */
struct tm_world {
    tm_bridge *bridge;
    tm_world *next;
    char name[TM_NAME_SIZE];
    int32_t max_agents, observation_count, continuous, branch_count;
    tm_observation *observations;
    int32_t *branches;
    size_t *floats; /* of each observation */
    size_t choices; /* of all branches */
    size_t *obs, reward, done, max_step, id, mask, ends, *end_obs, end_reward, end_status, end_id, continuous_at, discrete_at;
    uint8_t *spec;
    size_t spec_size, data_size;
    uint8_t *data;   /* the decisions of this exchange. One large copy at the hand-over beats many small writes to memory that another core read last */
    uint8_t *shared; /* the data in the memory file, once registered */
    int registered;
    int shared_rows; /* layout 0: decisions and ends lie in the same rows */
    int32_t decisions, ended, rows, end_rows; /* requested; `rows` counts attempts, of decisions or in layout 0 of both, `end_rows` those of ends elsewhere */
    float **own_end_obs;            /* ends are kept here, and put behind the decisions at the hand-over */
    float *own_end_reward;
    uint8_t *own_end_status;
    int32_t *own_end_id;
    int32_t action_count, *action_ids, *discrete_actions;
    float *continuous_actions;
    const float **seen; /* for the heuristic */
    void (*heuristic)(const tm_decision *, float *, int32_t *, void *);
    void *heuristic_user;
    void (*actuator)(tm_world *, tm_action, void *);
    void *actuator_user;
};

struct tm_bridge {
    int layout, state, framing;
    int greeted; /* a first step was answered without requests */
    char *first; /* path of the first file: the companions are named after it */
    char *path;  /* of the current one (layouts 3: of the header, always) */
    tm__map head, body; /* layout 0: one and the same file, in `head` */
    int32_t body_number;
    uint8_t *side;   /* the length of the side-channel data, then the data */
    size_t capacity; /* of both together */
    uint8_t *groups;
    size_t groups_size;
    int trainer_lock, simulator_lock; /* descriptors of PATH.trainer and PATH.simulator, -1: none */
    pid_t parent;
    int wakes; /* whether the trainer wakes us: learned */
    int trust;            /* that spinning pays */
    uint32_t idle, pause; /* without it: waits without a spin since the last one, and how many there are to be */
    double deadline, looked;
    tm_world *worlds, **last;
    void (*reset)(tm_bridge *, void *);
    void *reset_user;
    int send_lock, fault_lock;
    uint8_t *sending, *received;
    size_t sending_size, sending_room, received_room;
    tm__listener *listeners;
    tm__value *parameters, *properties;
    tm_engine engine;
    void (*on_engine)(tm_engine, void *);
    void *engine_user;
    int fault; /* of a request or a setter since the last exchange */
    char fault_text[512];
};

const tm_channel tm_engine_channel = {{0x2c, 0x34, 0x51, 0xe9, 0x7e, 0x4f, 0xea, 0x11, 0xb2, 0x38, 0x78, 0x4f, 0x43, 0x87, 0xd1, 0xf7}, 2};
const tm_channel tm_parameter_channel = {{0x1e, 0x89, 0x4c, 0x53, 0x0f, 0x81, 0xea, 0x11, 0xa9, 0xd0, 0x82, 0x24, 0x85, 0x86, 0x04, 0x00}, 3};
const tm_channel tm_statistic_channel = {{0xb7, 0xf7, 0xd8, 0xa1, 0xc8, 0xce, 0xf9, 0x50, 0xb7, 0x8b, 0xd3, 0xe1, 0x65, 0xa7, 0x85, 0x20}, 4};
const tm_channel tm_property_channel = {{0xd0, 0xf7, 0xcc, 0x60, 0x7e, 0x4f, 0xea, 0x11, 0xb2, 0x38, 0x78, 0x4f, 0x43, 0x87, 0xd1, 0xf7}, 1};

/* ---------------------------------------------------------------------------------------------------------------- errors */

static TM__THREAD char tm__text[512];

const char *tm_error(void) { return tm__text; }

static int tm__fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(tm__text, sizeof tm__text, format, arguments);
    va_end(arguments);
    return code;
}

/* An error of a request or a setter: whoever does not look at it there meets it at the next exchange. */
static int tm__note(tm_bridge *bridge, int code) {
    tm__lock(&bridge->fault_lock);
    if (!bridge->fault) {
        bridge->fault = code;
        memcpy(bridge->fault_text, tm__text, sizeof tm__text);
    }
    tm__unlock(&bridge->fault_lock);
    return code;
}

static void *tm__new(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory) tm__fail(TM_ERROR_MEMORY, "no memory for %zu items of %zu bytes; close what else runs, or lower max_agents", count, size);
    return memory;
}

static void *tm__copy(const void *from, size_t size) {
    void *to = tm__new(size, 1);
    if (to && size) memcpy(to, from, size);
    return to;
}

/* -------------------------------------------------------------------------------------------------------- bytes and files */

static int32_t tm__i32(const uint8_t *at) {
    int32_t value;
    memcpy(&value, at, 4);
    return value;
}

static float tm__f32(const uint8_t *at) {
    float value;
    memcpy(&value, at, 4);
    return value;
}

static uint8_t *tm__put_i32(uint8_t *at, int32_t value) {
    memcpy(at, &value, 4);
    return at + 4;
}

static void tm__unmap(tm__map *map) {
    if (map->at) munmap(map->at, map->size);
    memset(map, 0, sizeof *map);
}

/* Removes the file, if it is still the one that was mapped: another trainer may have made one of that name since. */
static void tm__remove(const char *path, const tm__map *map) {
    struct stat now;
    if (lstat(path, &now) == 0 && now.st_dev == map->device && now.st_ino == map->inode) unlink(path);
}

static int tm__map_file(const char *path, int descriptor, tm__map *map) {
    struct stat status;
    if (fstat(descriptor, &status) || !S_ISREG(status.st_mode) || status.st_size <= 0 || status.st_size > INT32_MAX)
        return tm__fail(TM_ERROR_FILE, "%s is no memory file (a regular file of 1 byte to 2 GiB); give the path that the trainer gave", path);
    map->size = (size_t)status.st_size;
    map->device = status.st_dev;
    map->inode = status.st_ino;
    map->at = (uint8_t *)mmap(NULL, map->size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (map->at == MAP_FAILED) {
        map->at = NULL;
        return tm__fail(TM_ERROR_FILE, "cannot map %s (%zu bytes): %s", path, map->size, strerror(errno));
    }
    return TM_OK;
}

static int tm__open_file(const char *path, tm__map *map) {
    int status, descriptor = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    memset(map, 0, sizeof *map);
    if (descriptor < 0)
        return tm__fail(TM_ERROR_FILE, "cannot open the memory file %s: %s; is the trainer that made it still there, and has no other simulator joined it?", path, strerror(errno));
    status = tm__map_file(path, descriptor, map);
    close(descriptor);
    return status;
}

static const char *tm__cure(int error) {
    if (error == ENOSPC || error == EDQUOT)
        return "remove what is not needed there, make it larger (/dev/shm: mount -o remount,size=1G /dev/shm; of a container: --shm-size=1g), or lower max_agents";
    return "see that the trainer that made the folder still lives, and that this user may write there";
}

static int tm__make_file(const char *path, size_t size, tm__map *map) {
    int status, descriptor = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    memset(map, 0, sizeof *map);
    if (descriptor < 0 && errno == EEXIST && unlink(path) == 0) /* left behind by one who was killed */
        descriptor = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (descriptor < 0) return tm__fail(TM_ERROR_FILE, "cannot make the memory file %s: %s; %s", path, strerror(errno), tm__cure(errno));
#ifdef __linux__
    status = posix_fallocate(descriptor, 0, (off_t)size); /* a full disk is an error here, and not a SIGBUS later */
    if (status == EINVAL || status == EOPNOTSUPP) status = ftruncate(descriptor, (off_t)size) ? errno : 0;
#else
    status = ftruncate(descriptor, (off_t)size) ? errno : 0;
#endif
    if (status)
        status = tm__fail(TM_ERROR_FILE, "no room for the memory file %s of %zu bytes: %s; %s", path, size, strerror(status), tm__cure(status));
    else
        status = tm__map_file(path, descriptor, map);
    close(descriptor);
    if (status) unlink(path);
    return status;
}

/* `path` and `count` underscores, in memory of its own. */
static char *tm__longer(const char *path, size_t count) {
    size_t length = strlen(path);
    const char *slash = strrchr(path, '/');
    char *longer;
    if (strlen(slash ? slash + 1 : path) + count > 255 || length + count >= 4096) {
        tm__fail(TM_ERROR_CAPACITY, "the memory file cannot grow any more: each change adds an underscore to its name, and %s has no room for more; "
                 "create worlds before the first exchange, send less on side channels, or give the trainer a shorter path", path);
        return NULL;
    }
    if (!(longer = (char *)tm__new(length + count + 1, 1))) return NULL;
    memcpy(longer, path, length);
    memset(longer + length, '_', count);
    return longer;
}

/* ------------------------------------------------------------------------------------------------------------ taking turns */

static double tm__clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static uint32_t *tm__word(const tm_bridge *bridge) {
    return (uint32_t *)(void *)(bridge->head.at + (bridge->layout == TM__LAYOUT_0 ? TM0_TURN : TM3_SIMULATOR_BLOCKED));
}

static int tm__ours(const tm_bridge *bridge, uint32_t word) {
    if (bridge->layout == TM__LAYOUT_0) return (word & 0xff) == TM_TURN_SIMULATOR;
    return (word & 0xff) == 0 && (word >> 8 & 0xff) != 0; /* neither blocked: a trainer that has not given a turn yet */
}

static int tm__closed(const tm_bridge *bridge, uint32_t word) {
    if (bridge->layout == TM__LAYOUT_0) return (word >> 8 & 0xff) == TM_COMMAND_CLOSE;
    return (word >> 24) != 0;
}

/* Sleeps while *word is `seen`, at most `seconds`; 1: somebody woke us. */
static int tm__sleep(uint32_t *word, uint32_t seen, double seconds) {
    struct timespec time;
    time.tv_sec = (time_t)seconds;
    time.tv_nsec = (long)((seconds - (double)time.tv_sec) * 1e9);
#if TM__FUTEX
    return syscall(SYS_futex, word, 0 /* FUTEX_WAIT, shared */, seen, &time, NULL, 0) == 0;
#else
    (void)word, (void)seen;
    if (seconds > 1e-3) time.tv_sec = 0, time.tv_nsec = 1000000;
    nanosleep(&time, NULL);
    return 0;
#endif
}

/* Gives the turn to the trainer. Everything that it is to see has been written before. */
static void tm__give(tm_bridge *bridge, int command) {
    uint8_t *at = bridge->head.at;
    if (bridge->layout == TM__LAYOUT_0) {
        at[TM0_COMMAND] = (uint8_t)command;
        tm__store(at + TM0_TURN, (uint8_t)TM_TURN_TRAINER);
    } else {
        if (command == TM_COMMAND_CLOSE) at[TM3_CLOSED] = 1;
        at[TM3_SIMULATOR_BLOCKED] = 1;
        tm__store(at + TM3_TRAINER_BLOCKED, (uint8_t)0);
    }
#if TM__FUTEX
    syscall(SYS_futex, tm__word(bridge), 1 /* FUTEX_WAKE */, INT_MAX, NULL, NULL, 0);
#endif
}

/* A Tidemill trainer holds a lock on PATH.trainer for as long as it lives; another one is the parent process. */
static int tm__trainer_lives(const tm_bridge *bridge) {
    if (bridge->trainer_lock < 0) return !bridge->parent || getppid() == bridge->parent;
    if (flock(bridge->trainer_lock, LOCK_SH | LOCK_NB)) return 1;
    flock(bridge->trainer_lock, LOCK_UN);
    return 0;
}

static void tm__remove_remains(const tm_bridge *bridge);
static void tm__detach(tm_bridge *bridge);

static int tm__died(tm_bridge *bridge) {
    tm__fail(TM_ERROR_DIED, "the trainer of %s has died (its lock is free or its process gone); start it again, it starts simulators itself", bridge->first);
    tm__remove_remains(bridge);
    tm__detach(bridge);
    return TM_ERROR_DIED;
}

/* Looks at most every 0.2 s whether the trainer lives. */
static int tm__look(tm_bridge *bridge, double now) {
    if (now - bridge->looked < 0.2) return TM_OK;
    bridge->looked = now;
    return tm__trainer_lives(bridge) ? TM_OK : tm__died(bridge);
}

#define TM__SPIN 300e-6
#define TM__MOST_TRUST 16
#define TM__FEE 8 /* a spin that did not pay costs so much of the trust that each one that did adds 1 to */

/* Whether to spin this time. Not where that often did not pay (the trainer thinks long, or needs our core); but it is tried again, more and more rarely. */
static int tm__spins(tm_bridge *bridge) {
    if (bridge->trust) return 1;
    if (++bridge->idle < bridge->pause) return 0;
    bridge->idle = 0;
    bridge->pause = bridge->pause < 2048 ? 2 * bridge->pause : 4096;
    return 1;
}

static int tm__wait(tm_bridge *bridge) {
    uint32_t *word = tm__word(bridge), seen = tm__load(word);
    double begun, now, nap = 50e-6;
    int slept = 0, woken;
    if (tm__closed(bridge, seen)) return TM_CLOSED;
    if (tm__ours(bridge, seen)) return TM_OK;
    begun = now = tm__clock();
    if (tm__spins(bridge)) {
        while (now - begun < TM__SPIN) {
            for (int i = 0; i < 16; i++) {
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
                __builtin_ia32_pause();
#endif
            }
            seen = tm__load(word);
            if (tm__ours(bridge, seen) || tm__closed(bridge, seen)) {
                if (bridge->trust < TM__MOST_TRUST) bridge->trust++;
                bridge->pause = 64;
                return tm__closed(bridge, seen) ? TM_CLOSED : TM_OK;
            }
            now = tm__clock();
        }
        bridge->trust = bridge->trust > TM__FEE ? bridge->trust - TM__FEE : 0;
    }
    for (;;) {
        seen = tm__load(word);
        if (tm__closed(bridge, seen)) return TM_CLOSED;
        if (tm__ours(bridge, seen)) return TM_OK;
        if (bridge->layout == TM__LAYOUT_0 && (seen & 0xff) > 1)
            return tm__fail(TM_ERROR_TRAINER, "the turn byte of %s is %u; it is 0 or 1: the file is damaged", bridge->path, seen & 0xff);
        if (slept) {
            now = tm__clock();
            if (tm__look(bridge, now) < 0) return TM_ERROR_DIED;
            if (bridge->deadline > 0 && now - begun > bridge->deadline)
                return tm__fail(TM_ERROR_DEADLINE, "no actions from the trainer for %.3g s, which is the deadline that tm_options sets; its process lives: "
                                "give it more time, or 0 for all that it needs", bridge->deadline);
        }
        /* A sleep that somebody ended says that the trainer wakes us; one that ran out although the word changed, that it does not. */
        woken = tm__sleep(word, seen, bridge->wakes ? 0.2 : nap);
        if (woken || tm__load(word) != seen) bridge->wakes = woken;
        nap = nap * 1.5 < 1e-3 ? nap * 1.5 : 1e-3;
        slept = 1;
    }
}

/* ------------------------------------------------------------------------------------------------- files that are replaced */

/* Finds its way in the files now mapped, which the trainer may have made: they must hold the registered worlds as these were written. */
static int tm__adopt(tm_bridge *bridge) {
    const uint8_t *at = bridge->head.at;
    int64_t capacity, length, groups = 0, expected = 0;
    uint8_t *place;
    size_t size;
    for (const tm_world *world = bridge->worlds; world; world = world->next)
        if (world->registered) expected++;
    if (bridge->layout == TM__LAYOUT_0) {
        capacity = tm__i32(at + TM0_SIDE_CAPACITY);
        length = tm__i32(at + TM0_FILE_LENGTH);
        size = bridge->head.size;
        if (capacity < 4 || TM0_SIDE_BASE + capacity + 4 + (int64_t)bridge->groups_size > (int64_t)size || length > (int64_t)size)
            return tm__fail(TM_ERROR_TRAINER, "%s says that its side channel takes %lld bytes and all of it %lld; the file has %zu, and %zu belong to worlds",
                            bridge->path, (long long)capacity, (long long)length, size, bridge->groups_size);
        groups = tm__i32(at + TM0_SIDE_BASE + capacity);
        bridge->side = bridge->head.at + TM0_SIDE_LENGTH;
        place = bridge->head.at + TM0_SIDE_BASE + capacity + 4;
    } else {
        capacity = tm__i32(at + TM3_SIDE_BYTES);
        length = tm__i32(at + TM3_RL_BYTES);
        size = bridge->body.size;
        if (capacity == 0 && length == 0 && size >= 4) capacity = 4; /* some trainers begin so */
        if (length > 0 && !expected)
            return tm__fail(TM_ERROR_TRAINER, "%s holds %lld bytes of groups of agents, and this simulator has registered none; if another simulator uses it, close that one",
                            bridge->path, (long long)length);
        if (capacity < 4 || length != (int64_t)bridge->groups_size || capacity + length > (int64_t)size)
            return tm__fail(TM_ERROR_TRAINER, "the header %s says %lld bytes of side channel and %lld of worlds; the body has %zu bytes, and worlds take %zu",
                            bridge->path, (long long)capacity, (long long)length, size, bridge->groups_size);
        groups = expected;
        bridge->side = bridge->body.at;
        place = bridge->body.at + capacity;
    }
    if (groups != expected)
        return tm__fail(TM_ERROR_TRAINER, "%s holds %lld groups of agents, and this simulator has registered %lld; if another simulator uses it, close that one",
                        bridge->path, (long long)groups, (long long)expected);
    bridge->capacity = (size_t)capacity;
    bridge->groups = place;
    for (tm_world *world = bridge->worlds; world; world = world->next) {
        if (!world->registered) continue;
        if (memcmp(place, world->spec, world->spec_size))
            return tm__fail(TM_ERROR_TRAINER, "the trainer's new file %s does not hold world %s as it was registered", bridge->path, world->name);
        world->shared = place + world->spec_size;
        place += world->spec_size + world->data_size;
    }
    return TM_OK;
}

/* Goes on in a larger file: room for `capacity` bytes of side channel, and `first` registered (all new worlds at once in layouts 3; NULL: none). */
static int tm__grow(tm_bridge *bridge, size_t capacity, tm_world *first) {
    int zero = bridge->layout == TM__LAYOUT_0, status;
    size_t before = bridge->groups_size, front = zero ? TM0_SIDE_BASE + capacity + 4 : capacity;
    uint64_t size = (uint64_t)front + before;
    int32_t groups = zero ? tm__i32(bridge->groups - 4) : 0;
    char *path;
    uint8_t *place;
    tm__map map;
    for (tm_world *world = first; world; world = zero ? NULL : world->next) size += world->spec_size + world->data_size;
    if (size > INT32_MAX)
        return tm__fail(TM_ERROR_CAPACITY, "the memory file would grow to %llu bytes; 2 GiB is the most: lower max_agents (%s has %d) or split the simulation",
                        (unsigned long long)size, first ? first->name : "none", first ? (int)first->max_agents : 0);
    if (!(path = tm__longer(bridge->path, zero ? 1 : (size_t)bridge->body_number + 1))) {
        if (first) {
            char text[sizeof tm__text];
            memcpy(text, tm__text, sizeof text);
            tm__fail(TM_ERROR_CAPACITY, "world '%s' cannot be registered: %.400s", first->name, text);
        }
        return TM_ERROR_CAPACITY;
    }
    if ((status = tm__make_file(path, (size_t)size, &map))) {
        free(path);
        return status;
    }
    if (before) memcpy(map.at + front, bridge->groups, before);
    place = map.at + front + before;
    for (tm_world *world = first; world; world = zero ? NULL : world->next) {
        memcpy(place, world->spec, world->spec_size);
        world->shared = place + world->spec_size;
        place += world->spec_size + world->data_size;
        world->registered = 1;
        groups++;
    }
    bridge->groups_size = (size_t)size - front;
    if (zero) {
        tm__put_i32(map.at + TM0_FILE_LENGTH, (int32_t)size);
        tm__put_i32(map.at + TM0_VERSION, 0);
        map.at[TM0_TURN] = TM_TURN_SIMULATOR;
        tm__put_i32(map.at + TM0_SIDE_CAPACITY, (int32_t)capacity);
        tm__put_i32(map.at + TM0_SIDE_BASE + capacity, groups);
        tm__give(bridge, TM_COMMAND_CHANGE_FILE);
        tm__unmap(&bridge->head);
        bridge->head = map;
        free(bridge->path);
        bridge->path = path;
    } else {
        tm__put_i32(bridge->head.at + TM3_BODY_NUMBER, ++bridge->body_number);
        tm__put_i32(bridge->head.at + TM3_SIDE_BYTES, (int32_t)capacity);
        tm__put_i32(bridge->head.at + TM3_RL_BYTES, (int32_t)bridge->groups_size);
        tm__unmap(&bridge->body); /* the trainer deletes it when it sees the number */
        bridge->body = map;
        free(path);
    }
    return tm__adopt(bridge);
}

/* Registers new worlds and makes room for what is to be sent. */
static int tm__prepare(tm_bridge *bridge) {
    size_t capacity = bridge->sending_size + 4 > bridge->capacity ? 2 * bridge->sending_size + 20 : bridge->capacity;
    tm_world *world = bridge->worlds;
    int status;
    while (world && world->registered) world = world->next;
    if (capacity == bridge->capacity && !world) return TM_OK;
    if (bridge->layout != TM__LAYOUT_0) return tm__grow(bridge, capacity, world);
    if (capacity != bridge->capacity && (status = tm__grow(bridge, capacity, NULL))) return status;
    for (; world; world = world->next)
        if ((status = tm__grow(bridge, capacity, world))) return status;
    return TM_OK;
}

/* The trainer has made a larger file: goes on there, and deletes the one that was read. */
static int tm__follow(tm_bridge *bridge) {
    char *path = tm__longer(bridge->path, 1);
    tm__map map;
    int status;
    if (!path) return TM_ERROR_CAPACITY;
    if ((status = tm__open_file(path, &map)) || map.size < TM0_HEADER_SIZE) {
        if (!status) status = tm__fail(TM_ERROR_TRAINER, "%s, to which the trainer changes, has only %zu bytes", path, map.size);
        tm__unmap(&map);
        free(path);
        return status;
    }
    tm__remove(bridge->path, &bridge->head);
    tm__unmap(&bridge->head);
    bridge->head = map;
    free(bridge->path);
    bridge->path = path;
    return tm__adopt(bridge);
}

/* The same in layouts 3: the header says which body is the newest. */
static int tm__follow_body(tm_bridge *bridge) {
    int32_t number = tm__i32(bridge->head.at + TM3_BODY_NUMBER);
    tm__map map;
    char *path;
    int status;
    if (number == bridge->body_number) return TM_OK;
    if (number < bridge->body_number || number > 4096)
        return tm__fail(TM_ERROR_TRAINER, "the header %s says that body %d is the newest; it was %d", bridge->path, (int)number, (int)bridge->body_number);
    if (!(path = tm__longer(bridge->path, (size_t)number))) return TM_ERROR_CAPACITY;
    status = tm__open_file(path, &map);
    free(path);
    if (status) return status;
    for (; bridge->body_number < number; bridge->body_number++)
        if ((path = tm__longer(bridge->path, (size_t)bridge->body_number))) {
            unlink(path);
            free(path);
        }
    tm__unmap(&bridge->body);
    bridge->body = map;
    return tm__adopt(bridge);
}

/* ----------------------------------------------------------------------------------------------------------- opening, closing */

static char *tm__companion(const tm_bridge *bridge, const char *ending) {
    size_t size = strlen(bridge->first) + strlen(ending) + 1;
    char *path = (char *)tm__new(size, 1);
    if (path) snprintf(path, size, "%s%s", bridge->first, ending);
    return path;
}

/* Looks for the file of a Tidemill trainer, on which it holds a lock for as long as it lives. */
static int tm__find_trainer(tm_bridge *bridge) {
    char *path = tm__companion(bridge, ".trainer");
    struct stat status;
    if (!path) return TM_ERROR_MEMORY;
    bridge->trainer_lock = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    free(path);
    if (bridge->trainer_lock < 0) return TM_OK;
    if (tm__trainer_lives(bridge) || fstat(bridge->trainer_lock, &status) || status.st_size == 0) return TM_OK; /* it is about to take the lock where there is no number yet */
    return tm__fail(TM_ERROR_DIED, "the trainer of %s is dead; a living one has to start this simulator", bridge->first);
}

/* Shows a Tidemill trainer that we are there: a file of our own, which is locked for as long as we live. One of a dead simulator is replaced. */
static int tm__show(tm_bridge *bridge) {
    char *path, text[24];
    int status = TM_OK, old, length = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    if (bridge->trainer_lock < 0) return TM_OK;
    if (!(path = tm__companion(bridge, ".simulator"))) return TM_ERROR_MEMORY;
    for (int attempt = 0; attempt < 3 && bridge->simulator_lock < 0; attempt++) {
        bridge->simulator_lock = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (bridge->simulator_lock >= 0 || (old = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC)) < 0) continue;
        if (flock(old, LOCK_EX | LOCK_NB) == 0) unlink(path);
        else usleep(10000); /* whoever looks whether we live holds it for an instant */
        close(old);
    }
    if (bridge->simulator_lock < 0)
        status = tm__fail(TM_ERROR_FILE, "another simulator has joined the trainer of %s (%s: %s); close it, or have this one started by a trainer of its own", bridge->first, path, strerror(errno));
    else if (flock(bridge->simulator_lock, LOCK_EX | LOCK_NB) || write(bridge->simulator_lock, text, (size_t)length) != length)
        status = tm__fail(TM_ERROR_FILE, "cannot write %s: %s; %s", path, strerror(errno), tm__cure(errno));
    free(path);
    return status;
}

static int tm__connect(tm_bridge *bridge, const tm_options *options) {
    const char *path = options->path ? options->path : "default";
    size_t size;
    int32_t first, second, third;
    int status;
    if (*path != '/') {
        const char *temporary = getenv("TMPDIR");
        if (!temporary || !*temporary) temporary = getenv("TEMP");
        if (!temporary || !*temporary) temporary = getenv("TMP");
        if (!temporary || !*temporary) temporary = "/tmp";
        size = strlen(temporary) + strlen(path) + sizeof "/ml-agents/";
        if ((bridge->first = (char *)tm__new(size, 1))) snprintf(bridge->first, size, "%s/ml-agents/%s", temporary, path);
    } else {
        bridge->first = (char *)tm__copy(path, strlen(path) + 1);
    }
    if (!bridge->first || !(bridge->path = (char *)tm__copy(bridge->first, strlen(bridge->first) + 1))) return TM_ERROR_MEMORY;
    if ((status = tm__find_trainer(bridge))) return !options->path ? TM__NOBODY : status;
    if ((status = tm__show(bridge))) return status; /* first: another simulator that has joined may have left this file for a larger one */
    if (!options->path && access(bridge->path, F_OK)) return TM__NOBODY;
    if ((status = tm__open_file(bridge->path, &bridge->head))) return status;
    if (bridge->head.size < TM0_HEADER_SIZE)
        return tm__fail(TM_ERROR_VERSION, "%s has %zu bytes, and the shortest memory file has %d: it is none, or damaged", path, bridge->head.size, TM0_HEADER_SIZE);
    first = tm__i32(bridge->head.at + TM3_MAJOR);
    second = tm__i32(bridge->head.at + TM3_MINOR);
    third = tm__i32(bridge->head.at + TM3_BUG);
    if (first != 0 && second == 0) {
        bridge->layout = TM__LAYOUT_0;
    } else if (first == 0 && second == 3 && third == 0 && bridge->head.size >= TM3_HEADER_SIZE_0) {
        bridge->layout = TM__LAYOUT_30;
    } else if (first == 0 && second == 3 && third == 2 && bridge->head.size >= TM3_HEADER_SIZE_2) {
        bridge->layout = TM__LAYOUT_32;
    } else if (first == 0) {
        return tm__fail(TM_ERROR_VERSION, "the trainer of %s speaks layout %d.%d.%d, and tidemill.h speaks 0, 0.3.0 and 0.3.2; choose one of these in the trainer, "
                        "or take the tidemill.h that came with it", path, (int)first, (int)second, (int)third);
    } else {
        return tm__fail(TM_ERROR_VERSION, "the trainer of %s speaks layout %d, and tidemill.h speaks 0, 0.3.0 and 0.3.2; choose one of these in the trainer, "
                        "or take the tidemill.h that came with it", path, (int)second);
    }
    if (bridge->layout != TM__LAYOUT_0) {
        char *body;
        bridge->body_number = tm__i32(bridge->head.at + TM3_BODY_NUMBER);
        if (bridge->body_number < 1 || bridge->body_number > 255)
            return tm__fail(TM_ERROR_TRAINER, "the header %s says that body %d is the newest; they are counted from 1", path, (int)bridge->body_number);
        if (!(body = tm__longer(bridge->path, (size_t)bridge->body_number))) return TM_ERROR_CAPACITY;
        status = tm__open_file(body, &bridge->body);
        free(body);
        if (status) return status;
    }
    return tm__adopt(bridge);
}

/* Removes what a dead trainer left: all of its files and its folder, if it made one for this bridge, else the files that we know of. */
static void tm__remove_remains(const tm_bridge *bridge) {
    const char *slash = strrchr(bridge->first, '/'), *base;
    size_t length = slash ? (size_t)(slash - bridge->first) : 0;
    struct dirent *entry;
    char *folder, *path;
    DIR *listing;
    if (bridge->head.at) tm__remove(bridge->path, &bridge->head);
    if (bridge->body.at && (path = tm__longer(bridge->path, (size_t)bridge->body_number))) {
        tm__remove(path, &bridge->body);
        free(path);
    }
    if (bridge->trainer_lock < 0) return;
    if ((path = tm__companion(bridge, ".trainer"))) {
        struct stat ours, there;
        if (fstat(bridge->trainer_lock, &ours) == 0 && lstat(path, &there) == 0 && ours.st_dev == there.st_dev && ours.st_ino == there.st_ino) unlink(path);
        free(path);
    }
    if (!slash || !(folder = (char *)tm__copy(bridge->first, length + 1))) return;
    folder[length] = 0;
    base = strrchr(folder, '/');
    if (strncmp(base ? base + 1 : folder, "tidemill-", 9) == 0 && (listing = opendir(folder))) {
        while ((entry = readdir(listing))) {
            const char *rest = entry->d_name + strlen(slash + 1);
            if (strncmp(entry->d_name, slash + 1, strlen(slash + 1))) continue;
            if (rest[strspn(rest, "_")] == 0 || !strcmp(rest, ".simulator") || !strcmp(rest, ".trainer") || !strcmp(rest, ".new"))
                unlinkat(dirfd(listing), entry->d_name, 0);
        }
        closedir(listing);
        rmdir(folder); /* which stays where anything else is in it: it was somebody's then */
    }
    free(folder);
}

/* Ends the connection; worlds go on in memory of their own, on their heuristics. */
static void tm__detach(tm_bridge *bridge) {
    for (tm_world *world = bridge->worlds; world; world = world->next) {
        world->shared = NULL;
        world->registered = 0;
        world->decisions = world->ended = world->rows = world->end_rows = world->action_count = 0;
    }
    tm__unmap(&bridge->head);
    tm__unmap(&bridge->body);
    if (bridge->trainer_lock >= 0) close(bridge->trainer_lock);
    if (bridge->simulator_lock >= 0) {
        char *path = tm__companion(bridge, ".simulator");
        if (path) unlink(path);
        free(path);
        close(bridge->simulator_lock);
    }
    bridge->trainer_lock = bridge->simulator_lock = -1;
    bridge->layout = TM__ALONE;
}

/* The trainer has closed: a Tidemill trainer removes all files itself, of another one they are ours to delete. */
static int tm__leave(tm_bridge *bridge) {
    if (bridge->trainer_lock < 0) tm__remove_remains(bridge);
    tm__detach(bridge);
    return TM_CLOSED;
}

tm_options tm_options_from(int argc, char **argv) {
    tm_options options;
    memset(&options, 0, sizeof options);
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--memory-path") == 0) options.path = argv[i + 1], options.started = 1;
    return options;
}

tm_bridge *tm_bridge_open(int argc, char **argv) {
    tm_options options = tm_options_from(argc, argv);
    return tm_bridge_open_with(&options);
}

tm_bridge *tm_bridge_open_with(const tm_options *options) {
    tm_bridge *bridge = (tm_bridge *)tm__new(1, sizeof *bridge);
    int status;
    if (!bridge) return NULL;
    bridge->layout = TM__ALONE;
    bridge->trainer_lock = bridge->simulator_lock = -1;
    bridge->framing = options->framing;
    bridge->deadline = options->deadline_seconds;
    bridge->last = &bridge->worlds;
    bridge->trust = TM__MOST_TRUST;
    bridge->pause = 64;
    bridge->parent = options->started ? getppid() : 0;
    status = tm__connect(bridge, options);
    if (status == TM__NOBODY) tm__detach(bridge);
    else if (status) {
        char text[sizeof tm__text];
        memcpy(text, tm__text, sizeof text);
        tm__detach(bridge); /* the files are the trainer's still */
        tm_bridge_close(bridge);
        memcpy(tm__text, text, sizeof text);
        return NULL;
    }
    return bridge;
}

int tm_bridge_has_trainer(const tm_bridge *bridge) { return bridge->layout != TM__ALONE; }

void tm_on_reset(tm_bridge *bridge, void (*callback)(tm_bridge *, void *), void *user) {
    bridge->reset = callback;
    bridge->reset_user = user;
}

static void tm__free_values(tm__value *value) {
    while (value) {
        tm__value *next = value->next;
        free(value->key);
        free(value->ranges);
        free(value);
        value = next;
    }
}

static void tm__free_world(tm_world *world) {
    if (world->own_end_obs)
        for (int32_t k = 0; k < world->observation_count; k++) free(world->own_end_obs[k]);
    free(world->own_end_obs);
    free(world->own_end_reward);
    free(world->own_end_status);
    free(world->own_end_id);
    free(world->observations);
    free(world->branches);
    free(world->floats);
    free(world->obs);
    free(world->end_obs);
    free(world->spec);
    free(world->data);
    free(world->action_ids);
    free(world->discrete_actions);
    free(world->continuous_actions);
    free((void *)world->seen);
    free(world);
}

void tm_bridge_close(tm_bridge *bridge) {
    if (!bridge) return;
    if (bridge->layout != TM__ALONE) {
        if (!tm__trainer_lives(bridge)) tm__remove_remains(bridge);
        else tm__give(bridge, TM_COMMAND_CLOSE); /* the trainer has not closed, and so deletes the files */
        tm__detach(bridge);
    }
    while (bridge->worlds) {
        tm_world *next = bridge->worlds->next;
        tm__free_world(bridge->worlds);
        bridge->worlds = next;
    }
    while (bridge->listeners) {
        tm__listener *next = bridge->listeners->next;
        free(bridge->listeners);
        bridge->listeners = next;
    }
    tm__free_values(bridge->parameters);
    tm__free_values(bridge->properties);
    free(bridge->sending);
    free(bridge->received);
    free(bridge->first);
    free(bridge->path);
    free(bridge);
}

/* ---------------------------------------------------------------------------------------------------------------- worlds */

/* The spec as it lies in memory; `at` NULL only counts its bytes. */
static size_t tm__write_spec(const tm_world *world, uint8_t *at) {
    int32_t layout = world->bridge->layout, actions = world->continuous ? world->continuous : world->branch_count;
    size_t name = strlen(world->name), size = layout == TM__LAYOUT_0 ? TM_NAME_SIZE : name + 1;
    int32_t k, b;
    if (layout == TM__LAYOUT_0 || layout == TM__LAYOUT_30)
        size += 4 + 1 + 4 + 4 * (size_t)world->branch_count + 4 + 12 * (size_t)world->observation_count;
    else
        size += 4 + 4 + 28 * (size_t)world->observation_count + 4 + 4 + 4 * (size_t)world->branch_count;
    if (!at) return size;
    memset(at, 0, size);
    at[0] = (uint8_t)name;
    memcpy(at + 1, world->name, name);
    at = tm__put_i32(at + (layout == TM__LAYOUT_0 ? TM_NAME_SIZE : name + 1), world->max_agents);
    if (layout == TM__LAYOUT_0 || layout == TM__LAYOUT_30) {
        *at++ = world->continuous > 0;
        at = tm__put_i32(at, actions);
        for (b = 0; b < world->branch_count; b++) at = tm__put_i32(at, world->branches[b]);
        at = tm__put_i32(at, world->observation_count);
        for (k = 0; k < world->observation_count; k++)
            for (int d = 0; d < 3; d++) at = tm__put_i32(at, world->observations[k].shape[d]);
        return size;
    }
    at = tm__put_i32(at, world->observation_count);
    for (k = 0; k < world->observation_count; k++) {
        for (int d = 0; d < 3; d++) at = tm__put_i32(at, world->observations[k].shape[d]);
        for (int d = 0; d < 3; d++) at = tm__put_i32(at, world->observations[k].properties[d]);
        at = tm__put_i32(at, world->observations[k].type);
    }
    at = tm__put_i32(at, world->continuous);
    at = tm__put_i32(at, world->branch_count);
    for (b = 0; b < world->branch_count; b++) at = tm__put_i32(at, world->branches[b]);
    return size;
}

/* Where everything lies in the data: 4 bytes n, then the blocks. */
static void tm__place(tm_world *world) {
    size_t agents = (size_t)world->max_agents, at = 4;
    int32_t k;
    for (k = 0; k < world->observation_count; k++) {
        world->obs[k] = at;
        at += 4 * agents * world->floats[k];
    }
    world->reward = at;
    at += 4 * agents;
    if (world->bridge->layout == TM__LAYOUT_0) {
        world->done = at;
        at += agents;
        world->max_step = at;
        at += agents;
    }
    world->id = at;
    at += 4 * agents;
    world->mask = at;
    at += agents * world->choices;
    if (world->bridge->layout != TM__LAYOUT_0) {
        world->ends = at;
        at += 4;
        for (k = 0; k < world->observation_count; k++) {
            world->end_obs[k] = at;
            at += 4 * agents * world->floats[k];
        }
        world->end_reward = at;
        at += 4 * agents;
        world->end_status = at;
        at += agents;
        world->end_id = at;
        at += 4 * agents;
    }
    world->continuous_at = at;
    at += 4 * agents * (size_t)world->continuous;
    world->discrete_at = at;
    at += 4 * agents * (size_t)world->branch_count;
    world->data_size = at;
}

static int tm__check_spec(tm_bridge *bridge, const tm_world_spec *spec) {
    size_t length = spec->name ? strlen(spec->name) : 0;
    uint64_t floats = 0, choices = 0, row;
    if (length < 1 || length > TM_MAX_NAME)
        return tm__fail(TM_ERROR_USAGE, "the world's name '%.80s' has %zu characters; memory has room for 1 to %d", spec->name ? spec->name : "", length, TM_MAX_NAME);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)spec->name[i] >= 128)
            return tm__fail(TM_ERROR_USAGE, "the world's name '%s' has a character beyond ASCII; use letters, digits and signs of ASCII", spec->name);
    if (tm_world_find(bridge, spec->name))
        return tm__fail(TM_ERROR_USAGE, "there is a world '%s' already; give each world a name of its own, or fetch it by tm_world_find", spec->name);
    if (spec->max_agents < 1 || spec->observation_count < 0 || spec->continuous < 0 || spec->branch_count < 0 || (spec->observation_count && !spec->observations) ||
        (spec->branch_count && !spec->branches))
        return tm__fail(TM_ERROR_USAGE, "world '%s': max_agents %d (at least 1), %d observations, %d continuous actions, %d branches; counts are 0 or more, with arrays to match",
                        spec->name, (int)spec->max_agents, (int)spec->observation_count, (int)spec->continuous, (int)spec->branch_count);
    if (spec->continuous == 0 && spec->branch_count == 0)
        return tm__fail(TM_ERROR_USAGE, "world '%s' has no actions; set .continuous or .branches", spec->name);
    if (spec->continuous && spec->branch_count && (bridge->layout == TM__LAYOUT_0 || bridge->layout == TM__LAYOUT_30))
        return tm__fail(TM_ERROR_USAGE, "world '%s' has %d continuous actions and %d branches, and the trainer's layout %s carries one kind only; choose layout 0.3.2 in the trainer, "
                        "or one kind of actions", spec->name, (int)spec->continuous, (int)spec->branch_count, bridge->layout == TM__LAYOUT_0 ? "0" : "0.3.0");
    for (int32_t k = 0; k < spec->observation_count; k++) {
        const int32_t *shape = spec->observations[k].shape;
        uint64_t product = 1;
        for (int d = 0; d < 3; d++) {
            if (shape[d] < 0 || (d == 0 && shape[d] == 0) || (d > 0 && shape[d] > 0 && shape[d - 1] == 0))
                return tm__fail(TM_ERROR_USAGE, "world '%s', observation %d: shape (%d, %d, %d); sizes are above 0, and those of unused dimensions, which come last, are 0",
                                spec->name, (int)k, (int)shape[0], (int)shape[1], (int)shape[2]);
            if (shape[d] && (product *= (uint64_t)shape[d]) > INT32_MAX) break;
        }
        floats += product;
        if (product > INT32_MAX || floats > INT32_MAX)
            return tm__fail(TM_ERROR_CAPACITY, "world '%s': its observations do not fit into 2 GiB; send smaller ones", spec->name);
    }
    for (int32_t b = 0; b < spec->branch_count; b++) {
        if (spec->branches[b] < 1)
            return tm__fail(TM_ERROR_USAGE, "world '%s': branch %d has %d choices; at least 1", spec->name, (int)b, (int)spec->branches[b]);
        choices += (uint64_t)spec->branches[b];
    }
    row = 8 * floats + 32 + choices + 4 * ((uint64_t)spec->continuous + (uint64_t)spec->branch_count);
    if (row * (uint64_t)spec->max_agents + 28 * (uint64_t)spec->observation_count + 4 * (uint64_t)spec->branch_count > INT32_MAX - 65536)
        return tm__fail(TM_ERROR_CAPACITY, "world '%s': %d agents of %llu bytes each do not fit into 2 GiB; lower max_agents", spec->name, (int)spec->max_agents, (unsigned long long)row);
    return TM_OK;
}

tm_world *tm_world_create(tm_bridge *bridge, const tm_world_spec *spec) {
    tm_world *world;
    size_t agents, count;
    int ok;
    if (tm__check_spec(bridge, spec) || !(world = (tm_world *)tm__new(1, sizeof *world))) return NULL;
    agents = (size_t)spec->max_agents;
    count = (size_t)spec->observation_count;
    world->bridge = bridge;
    strcpy(world->name, spec->name);
    world->max_agents = spec->max_agents;
    world->observation_count = spec->observation_count;
    world->continuous = spec->continuous;
    world->branch_count = spec->branch_count;
    ok = (world->observations = (tm_observation *)tm__copy(spec->observations, count * sizeof *spec->observations)) &&
         (world->branches = (int32_t *)tm__copy(spec->branches, (size_t)spec->branch_count * 4)) && (world->floats = (size_t *)tm__new(count, sizeof(size_t))) &&
         (world->obs = (size_t *)tm__new(count, sizeof(size_t))) && (world->end_obs = (size_t *)tm__new(count, sizeof(size_t))) &&
         (world->own_end_obs = (float **)tm__new(count, sizeof(float *))) && (world->seen = (const float **)tm__new(count, sizeof(float *)));
    for (size_t k = 0; ok && k < count; k++) {
        const int32_t *shape = spec->observations[k].shape;
        world->floats[k] = (size_t)shape[0] * (size_t)(shape[1] ? shape[1] : 1) * (size_t)(shape[2] ? shape[2] : 1);
        ok = (world->own_end_obs[k] = (float *)tm__new(agents * world->floats[k], 4)) != NULL;
    }
    for (int32_t b = 0; b < spec->branch_count; b++) world->choices += (size_t)spec->branches[b];
    if (ok) tm__place(world);
    world->spec_size = ok ? tm__write_spec(world, NULL) : 0;
    ok = ok && (world->spec = (uint8_t *)tm__new(world->spec_size, 1)) && (world->data = (uint8_t *)tm__new(world->data_size, 1)) &&
         (world->own_end_reward = (float *)tm__new(agents, 4)) && (world->own_end_status = (uint8_t *)tm__new(agents, 1)) &&
         (world->own_end_id = (int32_t *)tm__new(agents, 4)) && (world->action_ids = (int32_t *)tm__new(agents, 4)) &&
         (world->continuous_actions = (float *)tm__new(agents * (size_t)spec->continuous, 4)) &&
         (world->discrete_actions = (int32_t *)tm__new(agents * (size_t)spec->branch_count, 4));
    if (!ok) {
        tm__free_world(world);
        return NULL;
    }
    tm__write_spec(world, world->spec);
    world->shared_rows = bridge->layout == TM__LAYOUT_0;
    *bridge->last = world;
    bridge->last = &world->next;
    return world;
}

tm_world *tm_world_find(tm_bridge *bridge, const char *name) {
    for (tm_world *world = bridge->worlds; world; world = world->next)
        if (strcmp(world->name, name) == 0) return world;
    return NULL;
}

const char *tm_world_name(const tm_world *world) { return world->name; }

/* -------------------------------------------------------------------------------------------------------------- requests */

/* Takes a row. In layout 0 decisions and ends share max_agents rows, and are counted together first; elsewhere each have as many. */
static int32_t tm__take_row(tm_world *world, int32_t *counter) {
    int shared = world->bridge->layout == TM__LAYOUT_0, ends = counter == &world->ended;
    if (world->bridge->state == TM__THEIRS && world->bridge->layout != TM__ALONE) {
        tm__note(world->bridge, tm__fail(TM_ERROR_USAGE, "world '%s': a request while the trainer still thinks about those before (a deadline ran out); call tm_exchange first", world->name));
        return -1;
    }
    if (tm__add(ends && !shared ? &world->end_rows : &world->rows) < world->max_agents) return tm__add(counter);
    if (shared)
        tm__fail(TM_ERROR_CAPACITY, "world '%s' has had more than %d requests and ends in one exchange, which is its max_agents, and in layout 0 those that ask and those "
                 "that end share it; create it with more, and tell the trainer how many agents live at a time, seats={\"%s\": ...}; or choose layout 0.3.2 in the trainer, "
                 "where the two are counted apart", world->name, (int)world->max_agents, world->name);
    else
        tm__fail(TM_ERROR_CAPACITY, "world '%s' has had more than %d %s in one exchange, which is its max_agents; create it with more, or tell of each agent once per exchange",
                 world->name, (int)world->max_agents, ends ? "ends of episodes" : "requests");
    tm__note(world->bridge, TM_ERROR_CAPACITY);
    return -1;
}

tm_request tm_request_decision(tm_world *world, int32_t agent_id) {
    tm_request request;
    request.world = world;
    request.ended = 0;
    request.row = tm__take_row(world, &world->decisions);
    if (request.row >= 0) {
        size_t row = (size_t)request.row;
        for (int32_t k = 0; k < world->observation_count; k++) memset(world->data + world->obs[k] + 4 * row * world->floats[k], 0, 4 * world->floats[k]);
        memset(world->data + world->reward + 4 * row, 0, 4);
        tm__put_i32(world->data + world->id + 4 * row, agent_id);
        if (world->choices) memset(world->data + world->mask + row * world->choices, 0, world->choices);
    }
    return request;
}

static tm_request tm__end(tm_world *world, int32_t agent_id, uint8_t interrupted) {
    tm_request request;
    request.world = world;
    request.ended = 1;
    request.row = tm__take_row(world, &world->ended);
    if (request.row >= 0) {
        size_t row = (size_t)request.row;
        for (int32_t k = 0; k < world->observation_count; k++) memset(world->own_end_obs[k] + row * world->floats[k], 0, 4 * world->floats[k]);
        world->own_end_reward[row] = 0;
        world->own_end_status[row] = interrupted;
        world->own_end_id[row] = agent_id;
    }
    return request;
}

tm_request tm_end_episode(tm_world *world, int32_t agent_id) { return tm__end(world, agent_id, 0); }
tm_request tm_interrupt_episode(tm_world *world, int32_t agent_id) { return tm__end(world, agent_id, 1); }

int tm_set_reward(tm_request request, float reward) {
    if (request.row < 0) return TM_ERROR_USAGE;
    if (request.ended) request.world->own_end_reward[request.row] = reward;
    else memcpy(request.world->data + request.world->reward + 4 * (size_t)request.row, &reward, 4);
    return TM_OK;
}

int tm_set_observation(tm_request request, int32_t k, const float *values, size_t count) {
    const tm_world *world = request.world;
    if (request.row < 0) return TM_ERROR_USAGE;
    if (k < 0 || k >= world->observation_count)
        return tm__note(world->bridge, tm__fail(TM_ERROR_USAGE, "world '%s' has no observation %d; it has %d, counted from 0", world->name, (int)k, (int)world->observation_count));
    if (count != world->floats[k])
        return tm__note(world->bridge, tm__fail(TM_ERROR_USAGE, "world '%s', observation %d: %zu values given, its shape has %zu", world->name, (int)k, count, world->floats[k]));
    if (request.ended) memcpy(world->own_end_obs[k] + (size_t)request.row * count, values, 4 * count);
    else memcpy(world->data + world->obs[k] + 4 * (size_t)request.row * count, values, 4 * count);
    return TM_OK;
}

int tm_set_action_mask(tm_request request, int32_t branch, const uint8_t *forbidden, size_t count) {
    const tm_world *world = request.world;
    uint8_t *at;
    if (request.row < 0) return TM_ERROR_USAGE;
    if (request.ended || branch < 0 || branch >= world->branch_count || count != (size_t)world->branches[branch])
        return tm__note(world->bridge, tm__fail(TM_ERROR_USAGE, "world '%s': a mask of %zu choices for branch %d%s; it has %d branches%s", world->name, count, (int)branch,
                                                request.ended ? " of an episode that ended, which needs no action" : "", (int)world->branch_count,
                                                branch >= 0 && branch < world->branch_count ? ", and that one another number of choices" : ""));
    at = world->data + world->mask + (size_t)request.row * world->choices;
    for (int32_t b = 0; b < branch; b++) at += world->branches[b];
    for (size_t i = 0; i < count; i++) at[i] = forbidden[i] != 0;
    return TM_OK;
}

/* --------------------------------------------------------------------------------------------------------------- actions */

int32_t tm_action_count(const tm_world *world) { return world->action_count; }

tm_action tm_action_at(const tm_world *world, int32_t i) {
    tm_action action;
    memset(&action, 0, sizeof action);
    if (i < 0 || i >= world->action_count) {
        tm__fail(TM_ERROR_USAGE, "world '%s' has %d actions; there is no number %d", world->name, (int)world->action_count, (int)i);
        action.agent_id = -1;
        return action;
    }
    action.agent_id = world->action_ids[i];
    action.continuous = world->continuous_actions + (size_t)i * (size_t)world->continuous;
    action.discrete = world->discrete_actions + (size_t)i * (size_t)world->branch_count;
    return action;
}

void tm_on_action(tm_world *world, void (*callback)(tm_world *, tm_action, void *), void *user) {
    world->actuator = callback;
    world->actuator_user = user;
}

void tm_set_heuristic(tm_world *world, void (*heuristic)(const tm_decision *, float *, int32_t *, void *), void *user) {
    world->heuristic = heuristic;
    world->heuristic_user = user;
}

static int tm__check_actions(const tm_world *world) {
    size_t floats = (size_t)world->action_count * (size_t)world->continuous;
    for (size_t i = 0; i < floats; i++) {
        uint32_t bits; /* not finite: all bits of the exponent are set; -ffast-math cannot take this away */
        memcpy(&bits, world->continuous_actions + i, 4);
        if ((bits & 0x7f800000u) == 0x7f800000u)
            return tm__fail(TM_ERROR_TRAINER, "world '%s': action %d of agent %d is NaN or infinite; look for a training run that diverged", world->name,
                            (int)(i % (size_t)world->continuous), (int)world->action_ids[i / (size_t)world->continuous]);
    }
    for (int32_t i = 0; i < world->action_count; i++)
        for (int32_t b = 0; b < world->branch_count; b++) {
            int32_t choice = world->discrete_actions[(size_t)i * (size_t)world->branch_count + (size_t)b];
            if (choice < 0 || choice >= world->branches[b])
                return tm__fail(TM_ERROR_TRAINER, "world '%s': the trainer chose %d in branch %d for agent %d; the branch has choices 0 to %d", world->name, (int)choice, (int)b,
                                (int)world->action_ids[i], (int)world->branches[b] - 1);
        }
    return TM_OK;
}

/* -------------------------------------------------------------------------------------------------------------- exchange */

static void tm__drop(tm_bridge *bridge, int actions_too) {
    for (tm_world *world = bridge->worlds; world; world = world->next) {
        world->decisions = world->ended = world->rows = world->end_rows = 0;
        if (actions_too) world->action_count = 0;
    }
}

/* Copies the rows into the shared memory: ends behind the decisions in layout 0, in their own part in layouts 3. */
static void tm__write_rows(const tm_world *world) {
    size_t decisions = (size_t)world->decisions, ended = (size_t)world->ended, agents = (size_t)world->max_agents;
    const uint8_t *data = world->data;
    uint8_t *to = world->shared;
    for (int32_t k = 0; k < world->observation_count; k++) {
        size_t row = 4 * world->floats[k];
        memcpy(to + world->obs[k], data + world->obs[k], decisions * row);
        memcpy(to + (world->shared_rows ? world->obs[k] + decisions * row : world->end_obs[k]), world->own_end_obs[k], ended * row);
    }
    memcpy(to + world->reward, data + world->reward, 4 * decisions);
    memcpy(to + world->id, data + world->id, 4 * decisions);
    memcpy(to + world->mask, data + world->mask, decisions * world->choices);
    if (world->shared_rows) {
        tm__put_i32(to, (int32_t)(decisions + ended));
        memset(to + world->done, 0, decisions);
        memset(to + world->max_step, 0, decisions);
        memcpy(to + world->reward + 4 * decisions, world->own_end_reward, 4 * ended);
        memset(to + world->done + decisions, 1, ended);
        memcpy(to + world->max_step + decisions, world->own_end_status, ended);
        memcpy(to + world->id + 4 * decisions, world->own_end_id, 4 * ended);
        memset(to + world->mask + decisions * world->choices, 0, ended * world->choices);
    } else {
        tm__put_i32(to, (int32_t)decisions);
        tm__put_i32(to + world->ends, (int32_t)ended);
        memcpy(to + world->end_reward, world->own_end_reward, 4 * ended);
        memcpy(to + world->end_status, world->own_end_status, ended);
        memcpy(to + world->end_id, world->own_end_id, 4 * ended);
    }
    /* Whatever the trainer does not set is 0. */
    memset(to + world->continuous_at, 0, 4 * agents * (size_t)(world->continuous + world->branch_count));
}

static int tm__write_channels(tm_bridge *bridge) {
    tm__put_i32(bridge->side, (int32_t)bridge->sending_size);
    if (bridge->sending_size) memcpy(bridge->side + 4, bridge->sending, bridge->sending_size);
    bridge->sending_size = 0;
    return TM_OK;
}

static int tm__hand_over(tm_bridge *bridge) {
    int status = tm__prepare(bridge);
    if (status) return status;
    for (tm_world *world = bridge->worlds; world; world = world->next) {
        world->action_count = 0;
        tm__write_rows(world);
    }
    tm__write_channels(bridge);
    bridge->state = TM__THEIRS;
    tm__give(bridge, TM_COMMAND_STEP);
    return TM_OK;
}

static int tm__deliver(tm_bridge *bridge);

static void tm__act(tm_world *world) {
    if (!world->actuator) return;
    for (int32_t i = 0; i < world->action_count; i++) world->actuator(world, tm_action_at(world, i), world->actuator_user);
}

static int tm__take_actions(tm_bridge *bridge) {
    int status = TM_OK;
    for (tm_world *world = bridge->worlds; world; world = world->next) {
        size_t count = (size_t)world->decisions;
        world->action_count = world->decisions;
        memcpy(world->action_ids, world->data + world->id, 4 * count);
        memcpy(world->continuous_actions, world->shared + world->continuous_at, 4 * count * (size_t)world->continuous);
        memcpy(world->discrete_actions, world->shared + world->discrete_at, 4 * count * (size_t)world->branch_count);
        if (!status && (status = tm__check_actions(world))) break;
    }
    tm__drop(bridge, status != TM_OK);
    if (status) return status;
    for (tm_world *world = bridge->worlds; world; world = world->next) tm__act(world);
    return TM_OK;
}

/* After a change of files that made no sense there is nothing left to read or to write. */
static int tm__lost(tm_bridge *bridge, int status) {
    tm__detach(bridge);
    return status;
}

/* Waits for the trainer's command (where `patient`: otherwise TM_IDLE if none has come) and does what it says. */
static int tm__receive(tm_bridge *bridge, int answered, int patient) {
    for (;;) {
        uint8_t *at;
        uint32_t word = tm__load(tm__word(bridge));
        int status, reset;
        if (!patient && !tm__ours(bridge, word) && !tm__closed(bridge, word)) return TM_IDLE;
        status = tm__wait(bridge);
        if (status == TM_CLOSED) return tm__leave(bridge);
        if (status) return status;
        at = bridge->head.at;
        if (bridge->layout == TM__LAYOUT_0) {
            int command = at[TM0_COMMAND];
            if (command == TM_COMMAND_CHANGE_FILE) {
                if ((status = tm__follow(bridge))) return tm__lost(bridge, status);
                continue;
            }
            if (command != TM_COMMAND_STEP && command != TM_COMMAND_RESET) {
                bridge->state = TM__MINE;
                return tm__fail(TM_ERROR_TRAINER, "the trainer's command is %d; it is 0 (step), 1 (reset), 2 (change file) or 3 (close)", command);
            }
            reset = command == TM_COMMAND_RESET;
        } else {
            if ((status = tm__follow_body(bridge))) return tm__lost(bridge, status);
            reset = at[TM3_RESET] != 0;
            at[TM3_RESET] = 0;
        }
        bridge->state = TM__MINE;
        if ((status = tm__deliver(bridge))) {
            tm__drop(bridge, 1);
            return status;
        }
        if (bridge->layout == TM__LAYOUT_32 && at[TM3_QUERY] && !reset) { /* side channels only: nothing of the worlds is touched */
            at[TM3_QUERY] = 0;
            if (bridge->sending_size + 4 > bridge->capacity && (status = tm__grow(bridge, 2 * bridge->sending_size + 20, NULL))) return status;
            tm__write_channels(bridge);
            bridge->state = answered ? TM__THEIRS : TM__FIRST;
            tm__give(bridge, TM_COMMAND_STEP);
            continue;
        }
        if (reset) {
            tm__drop(bridge, 1);
            if (bridge->reset) bridge->reset(bridge, bridge->reset_user);
            return TM_RESET;
        }
        return answered ? tm__take_actions(bridge) : TM_OK;
    }
}

/* Without a trainer the worlds' own heuristics act. */
static int tm__alone(tm_bridge *bridge) {
    bridge->sending_size = 0;
    for (tm_world *world = bridge->worlds; world; world = world->next) {
        size_t count = (size_t)world->decisions, continuous = (size_t)world->continuous, branches = (size_t)world->branch_count;
        world->action_count = world->decisions;
        memcpy(world->action_ids, world->data + world->id, 4 * count);
        memset(world->continuous_actions, 0, 4 * count * continuous);
        memset(world->discrete_actions, 0, 4 * count * branches);
        for (size_t i = 0; world->heuristic && i < count; i++) {
            tm_decision decision;
            decision.agent_id = world->action_ids[i];
            decision.reward = tm__f32(world->data + world->reward + 4 * i);
            /* In the world's own memory all floats are aligned. */
            for (int32_t k = 0; k < world->observation_count; k++) world->seen[k] = (const float *)(const void *)(world->data + world->obs[k]) + i * world->floats[k];
            decision.observations = world->seen;
            decision.forbidden = world->data + world->mask + i * world->choices;
            world->heuristic(&decision, world->continuous_actions + i * continuous, world->discrete_actions + i * branches, world->heuristic_user);
        }
    }
    tm__drop(bridge, 0);
    for (tm_world *world = bridge->worlds; world; world = world->next) tm__act(world);
    return TM_OK;
}

int tm_exchange(tm_bridge *bridge) {
    int requests = 0, status;
    if (bridge->fault) {
        status = bridge->fault;
        memcpy(tm__text, bridge->fault_text, sizeof tm__text);
        bridge->fault = 0;
        tm__drop(bridge, 1);
        return status;
    }
    for (const tm_world *world = bridge->worlds; world; world = world->next) requests |= world->decisions || world->ended;
    if (bridge->layout == TM__ALONE) return requests ? tm__alone(bridge) : TM_IDLE;
    if (bridge->state == TM__THEIRS) return tm__receive(bridge, 1, 1); /* after a deadline */
    if (tm__closed(bridge, tm__load(tm__word(bridge)))) return tm__leave(bridge);
    if (bridge->state == TM__FIRST) {
        status = tm__receive(bridge, 0, requests);
        if (status && status != TM_IDLE) return status;
        if (!status && !requests && !bridge->greeted) { /* a trainer resets only after an answer, and some worlds have agents only after a reset */
            if ((status = tm__hand_over(bridge))) return status;
            bridge->greeted = 1;
            bridge->state = TM__FIRST;
        }
    }
    if (!requests) {
        status = tm__look(bridge, tm__clock());
        return status < 0 ? status : TM_IDLE;
    }
    if ((status = tm__hand_over(bridge))) return status;
    return tm__receive(bridge, 1, 1);
}

/* --------------------------------------------------------------------------------------------------------- side channels */

int tm_send(tm_bridge *bridge, const tm_channel *channel, const void *bytes, size_t count) {
    size_t key = bridge->framing == TM_FRAMING_TYPE ? 4 : 16, size = key + 4 + count;
    int status = TM_OK;
    if (bridge->layout == TM__ALONE) return TM_OK; /* nobody listens */
    tm__lock(&bridge->send_lock);
    if (count > (size_t)INT32_MAX / 4 || bridge->sending_size + size > (size_t)INT32_MAX / 4) {
        status = tm__fail(TM_ERROR_CAPACITY, "%zu bytes on a side channel, after %zu in the same exchange: 512 MiB is the most; send less at a time", count, bridge->sending_size);
    } else {
        if (bridge->sending_size + size > bridge->sending_room) {
            size_t room = 2 * (bridge->sending_size + size);
            uint8_t *larger = (uint8_t *)realloc(bridge->sending, room);
            if (larger) bridge->sending = larger, bridge->sending_room = room;
            else status = tm__fail(TM_ERROR_MEMORY, "no memory for %zu bytes of side channels", room);
        }
        if (!status) {
            uint8_t *at = bridge->sending + bridge->sending_size;
            if (key == 4) tm__put_i32(at, channel->type);
            else memcpy(at, channel->uuid, 16);
            tm__put_i32(at + key, (int32_t)count);
            if (count) memcpy(at + key + 4, bytes, count);
            bridge->sending_size += size;
        }
    }
    tm__unlock(&bridge->send_lock);
    return status;
}

int tm_listen(tm_bridge *bridge, const tm_channel *channel, void (*callback)(const uint8_t *, size_t, void *), void *user) {
    tm__listener *listener = (tm__listener *)tm__new(1, sizeof *listener);
    if (!listener) return TM_ERROR_MEMORY;
    listener->channel = *channel;
    listener->callback = callback;
    listener->user = user;
    listener->next = bridge->listeners;
    bridge->listeners = listener;
    return TM_OK;
}

/* A message as it is read: what is asked of it beyond its end makes `torn` true. */
typedef struct tm__message {
    const uint8_t *at;
    size_t left;
    int torn;
} tm__message;

static int32_t tm__read_i32(tm__message *message) {
    int32_t value;
    if (message->left < 4) return message->torn = 1, 0;
    value = tm__i32(message->at);
    message->at += 4;
    message->left -= 4;
    return value;
}

static float tm__read_f32(tm__message *message) {
    int32_t bits = tm__read_i32(message);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* A string of the message, in memory of its own; NULL: torn, or no memory. */
static char *tm__read_string(tm__message *message) {
    int32_t length = tm__read_i32(message);
    char *text;
    if (message->torn || length < 0 || (size_t)length > message->left) return message->torn = 1, (char *)NULL;
    for (int32_t i = 0; i < length; i++)
        if (message->at[i] == 0 || message->at[i] >= 128) return message->torn = 1, (char *)NULL;
    if (!(text = (char *)tm__new((size_t)length + 1, 1))) return message->torn = 1, (char *)NULL;
    memcpy(text, message->at, (size_t)length);
    message->at += length;
    message->left -= (size_t)length;
    return text;
}

static tm__value *tm__value_of(tm__value *first, const char *key) {
    while (first && strcmp(first->key, key)) first = first->next;
    return first;
}

/* Puts a value into the list in the place of the one of that key. */
static void tm__keep(tm__value **first, tm__value *value) {
    for (tm__value **at = first; *at; at = &(*at)->next)
        if (strcmp((*at)->key, value->key) == 0) {
            tm__value *old = *at;
            *at = old->next;
            old->next = NULL;
            tm__free_values(old);
            break;
        }
    value->next = *first;
    *first = value;
}

static void tm__read_parameter(tm_bridge *bridge, tm__message *message) {
    tm__value *value = (tm__value *)tm__new(1, sizeof *value);
    int32_t kind;
    if (!value) {
        message->torn = 1;
        return;
    }
    value->key = tm__read_string(message);
    value->sampler = -1;
    kind = tm__read_i32(message);
    if (kind == 0) {
        value->value = tm__read_f32(message);
    } else if (kind == 1) {
        value->random = (uint32_t)tm__read_i32(message);
        value->sampler = tm__read_i32(message);
        if (value->sampler == 0 || value->sampler == 1) {
            value->first = tm__read_f32(message);
            value->second = tm__read_f32(message);
        } else if (value->sampler == 2) {
            int32_t numbers = tm__read_i32(message);
            if (message->torn || numbers < 2 || numbers % 2 || (size_t)numbers > message->left / 4 || !(value->ranges = (float *)tm__new((size_t)numbers, 4))) {
                message->torn = 1;
            } else {
                value->range_count = numbers / 2;
                for (int32_t i = 0; i < numbers; i++) value->ranges[i] = tm__read_f32(message);
            }
        } else {
            message->torn = 1;
        }
    } else {
        message->torn = 1;
    }
    if (message->torn || message->left) {
        message->torn = 1;
        tm__free_values(value);
        return;
    }
    tm__keep(&bridge->parameters, value);
}

static void tm__read_property(tm_bridge *bridge, tm__message *message) {
    tm__value *value = (tm__value *)tm__new(1, sizeof *value);
    if (!value) {
        message->torn = 1;
        return;
    }
    value->key = tm__read_string(message);
    value->sampler = -1;
    value->value = tm__read_f32(message);
    if (message->torn || message->left) {
        message->torn = 1;
        tm__free_values(value);
        return;
    }
    tm__keep(&bridge->properties, value);
}

static void tm__read_engine(tm_bridge *bridge, tm__message *message) {
    tm_engine engine = bridge->engine;
    int32_t what;
    if (bridge->framing == TM_FRAMING_TYPE) { /* the older form: all at once */
        engine.width = tm__read_i32(message);
        engine.height = tm__read_i32(message);
        engine.quality = tm__read_i32(message);
        engine.time_scale = tm__read_f32(message);
        engine.target_frame_rate = tm__read_i32(message);
        engine.set |= TM_ENGINE_RESOLUTION | TM_ENGINE_QUALITY | TM_ENGINE_TIME_SCALE | TM_ENGINE_FRAME_RATE;
    } else {
        what = tm__read_i32(message);
        if (what == 0) {
            engine.width = tm__read_i32(message);
            engine.height = tm__read_i32(message);
        } else if (what == 1) {
            engine.quality = tm__read_i32(message);
        } else if (what == 2) {
            engine.time_scale = tm__read_f32(message);
        } else if (what == 3) {
            engine.target_frame_rate = tm__read_i32(message);
        } else if (what == 4) {
            engine.capture_frame_rate = tm__read_i32(message);
        } else {
            message->torn = 1;
        }
        if (!message->torn) engine.set |= 1 << what;
    }
    if (message->torn || message->left) {
        message->torn = 1;
        return;
    }
    bridge->engine = engine;
    if (bridge->on_engine) bridge->on_engine(engine, bridge->engine_user);
}

static int tm__is(const tm_bridge *bridge, const tm_channel *channel, const uint8_t *key) {
    if (bridge->framing == TM_FRAMING_TYPE) return tm__i32(key) == channel->type;
    return memcmp(key, channel->uuid, 16) == 0;
}

/* Copies what came on the side channels and hands each message to those who listen. Nothing is read from memory that the trainer could still change. */
static int tm__deliver(tm_bridge *bridge) {
    int32_t length = tm__i32(bridge->side);
    size_t key = bridge->framing == TM_FRAMING_TYPE ? 4 : 16, at = 0, size = (size_t)length;
    tm__put_i32(bridge->side, 0);
    if (length < 0 || size + 4 > bridge->capacity)
        return tm__fail(TM_ERROR_TRAINER, "the trainer says that %d bytes are on the side channels, which hold %zu at most", (int)length, bridge->capacity - 4);
    if (size > bridge->received_room) {
        uint8_t *larger = (uint8_t *)realloc(bridge->received, size);
        if (!larger) return tm__fail(TM_ERROR_MEMORY, "no memory for %zu bytes of side channels", size);
        bridge->received = larger;
        bridge->received_room = size;
    }
    if (size) memcpy(bridge->received, bridge->side + 4, size);
    while (at < size) {
        const uint8_t *name = bridge->received + at;
        tm__message message;
        int32_t count = size - at < key + 4 ? -1 : tm__i32(name + key);
        if (count < 0 || (size_t)count > size - at - key - 4)
            return tm__fail(TM_ERROR_TRAINER, "side channels: at byte %zu of %zu a message of %d bytes begins; do both ends use the same framing (%s here)?", at, size, (int)count,
                            key == 4 ? "type" : "uuid");
        message.at = name + key + 4;
        message.left = (size_t)count;
        message.torn = 0;
        if (tm__is(bridge, &tm_parameter_channel, name)) tm__read_parameter(bridge, &message);
        else if (tm__is(bridge, &tm_property_channel, name)) tm__read_property(bridge, &message);
        else if (tm__is(bridge, &tm_engine_channel, name)) tm__read_engine(bridge, &message);
        if (message.torn)
            return tm__fail(TM_ERROR_TRAINER, "side channels: the message of %d bytes at byte %zu is not what its channel (environment parameters, float properties or engine settings) carries",
                            (int)count, at);
        for (const tm__listener *listener = bridge->listeners; listener; listener = listener->next)
            if (tm__is(bridge, &listener->channel, name)) listener->callback(name + key + 4, (size_t)count, listener->user);
        at += key + 4 + (size_t)count;
    }
    return TM_OK;
}

tm_engine tm_engine_settings(const tm_bridge *bridge) { return bridge->engine; }

void tm_on_engine(tm_bridge *bridge, void (*callback)(tm_engine, void *), void *user) {
    bridge->on_engine = callback;
    bridge->engine_user = user;
}

/* A number in [0, 1), from a counter that is mixed well. */
static double tm__uniform(uint32_t *state) {
    uint32_t x = *state += 0x9E3779B9u;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return (x ^ x >> 16) / 4294967296.0;
}

float tm_parameter(tm_bridge *bridge, const char *key, float otherwise) {
    tm__value *value = tm__value_of(bridge->parameters, key);
    double u, all = 0;
    if (!value) return otherwise;
    if (value->sampler < 0) return value->value;
    u = tm__uniform(&value->random);
    if (value->sampler == 0) return (float)(value->first + ((double)value->second - value->first) * u);
    if (value->sampler == 1) return (float)(value->first + value->second * sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * tm__uniform(&value->random)));
    for (int32_t i = 0; i < value->range_count; i++) all += fabs((double)value->ranges[2 * i + 1] - value->ranges[2 * i]);
    u *= all; /* a range in proportion to its width, then uniform in it */
    for (int32_t i = 0; i < value->range_count; i++) {
        double from = value->ranges[2 * i], width = value->ranges[2 * i + 1] - from;
        if (u < fabs(width) || i == value->range_count - 1) return (float)(from + (width < 0 ? -u : u));
        u -= fabs(width);
    }
    return otherwise;
}

/* Sends a key, a float, and where `how` is 0 or more that, too. */
static int tm__send_float(tm_bridge *bridge, const tm_channel *channel, const char *key, float value, int how) {
    uint8_t bytes[256 + 12];
    size_t length = strlen(key);
    if (length > 256) return tm__fail(TM_ERROR_USAGE, "the key '%.40s…' has %zu characters; 256 is the most", key, length);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)key[i] >= 128) return tm__fail(TM_ERROR_USAGE, "the key '%s' has a character beyond ASCII", key);
    tm__put_i32(bytes, (int32_t)length);
    memcpy(bytes + 4, key, length);
    memcpy(bytes + 4 + length, &value, 4);
    tm__put_i32(bytes + 8 + length, how);
    return tm_send(bridge, channel, bytes, length + (how < 0 ? 8 : 12));
}

int tm_statistic(tm_bridge *bridge, const char *key, float value, int how) {
    if (how < TM_AVERAGE || how > TM_SUM)
        return tm__fail(TM_ERROR_USAGE, "statistic '%.80s': how is %d; TM_AVERAGE (0), TM_MOST_RECENT (1) or TM_SUM (2)", key, how);
    return tm__send_float(bridge, &tm_statistic_channel, key, value, how);
}

float tm_property(const tm_bridge *bridge, const char *key, float otherwise) {
    const tm__value *value = tm__value_of(bridge->properties, key);
    return value ? value->value : otherwise;
}

int tm_set_property(tm_bridge *bridge, const char *key, float number) {
    int status = tm__send_float(bridge, &tm_property_channel, key, number, -1);
    tm__value *value;
    if (status) return status;
    if (!(value = (tm__value *)tm__new(1, sizeof *value))) return TM_ERROR_MEMORY;
    if (!(value->key = (char *)tm__copy(key, strlen(key) + 1))) {
        free(value);
        return TM_ERROR_MEMORY;
    }
    value->sampler = -1;
    value->value = number;
    tm__keep(&bridge->properties, value);
    return TM_OK;
}

#endif /* TIDEMILL_IMPLEMENTED */
#endif /* TIDEMILL_IMPLEMENTATION */
