#include "src/python/native/python_owner.hpp"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pinflow::python {

namespace {

/// The references that were given up. Never destroyed: threads may outlive the interpreter.
struct given_up {
    std::mutex mutex;
    std::vector<PyObject*> objects;
    bool is_scheduled = false;
    std::atomic<bool> has_some = false;
    std::atomic<bool> ended = false;
};

given_up& all_given_up() {
    static auto& only = *new given_up;
    return only;
}

int drop_when_asked(void*) {
    {
        const std::lock_guard lock(all_given_up().mutex);
        all_given_up().is_scheduled = false;
    }
    drop_given_up();
    return 0;
}

/// Takes no GIL, so that a deleter may run anywhere.
void give_up(PyObject* object) noexcept {
    given_up& all = all_given_up();
    if (all.ended) return;
    bool schedule = false;
    try {
        const std::lock_guard lock(all.mutex);
        all.objects.push_back(object);
        all.has_some = true;
        schedule = !std::exchange(all.is_scheduled, true);
    } catch (...) {
        return;  // without memory for its place, the object is kept for ever
    }
    // if the interpreter's queue is full, a later call of drop_given_up drops it
    if (schedule && Py_AddPendingCall(&drop_when_asked, nullptr) != 0) {
        const std::lock_guard lock(all.mutex);
        all.is_scheduled = false;
    }
}

}  // namespace

std::shared_ptr<PyObject> keep(nanobind::handle object) {
    Py_INCREF(object.ptr());
    return {object.ptr(), give_up};
}

void drop_given_up() noexcept {
    given_up& all = all_given_up();
    if (!all.has_some.load(std::memory_order_relaxed)) return;
    std::vector<PyObject*> objects;
    {
        const std::lock_guard lock(all.mutex);
        objects.swap(all.objects);
        all.has_some = false;
    }
    for (PyObject* const object : objects)
        Py_DECREF(object);  // may run Python code, which may give up more
}

namespace {

std::atomic<bool> ending = false;
std::thread::id ending_thread;  ///< set before `ending`

}  // namespace

void begin_ending() noexcept {
    ending_thread = std::this_thread::get_id();
    ending = true;
}

bool is_ending() noexcept {
    return ending;
}

void stop_dropping() noexcept {
    drop_given_up();
    all_given_up().ended = true;
}

namespace {

thread_local const python_callback* innermost = nullptr;

}  // namespace

python_callback::python_callback(const PyObject* object) noexcept
    : object_(object), outer_(std::exchange(innermost, this)) {}
python_callback::~python_callback() {
    innermost = outer_;
}
bool python_callback::is_running() noexcept {
    return innermost != nullptr;
}
bool python_callback::is_running_of(const PyObject* object) noexcept {
    const python_callback* each = innermost;
    while (each != nullptr && each->object_ != object)
        each = each->outer_;
    return each != nullptr;
}

bool may_not_take_gil() noexcept {
    return ending && std::this_thread::get_id() != ending_thread && !python_callback::is_running();
}

void block_forever() noexcept {
    for (;;)
        ::pause();
}

namespace {

/// Calls `take`, which takes the GIL. Blocks forever if Python is ending and this thread may not take it.
template <typename Function>
auto take_gil_or_block(Function take) noexcept {
    if (may_not_take_gil()) block_forever();
    try {
        return take();
    } catch (const abi::__forced_unwind&) {
        block_forever();  // Python has begun to end meanwhile, and ends this thread by pthread_exit
    }
}

}  // namespace

gil_acquire::gil_acquire() : state_(take_gil_or_block([] { return PyGILState_Ensure(); })) {}

gil_release::~gil_release() {
    take_gil_or_block([&] { PyEval_RestoreThread(state_); });
}

void drop(PyObject* object) noexcept {
    const bool has_state = !all_given_up().ended && PyGILState_GetThisThreadState() != nullptr;
    if (!has_state || may_not_take_gil()) return give_up(object);
    with_gil([&] { Py_DECREF(object); });
}

}  // namespace pinflow::python
