// Makes PCI functions that QEMU emulates look like GPUs. It changes only struct pci_dev in Linux, before a driver sees
// the function. So sysfs, modalias, uevents and the matching of drivers agree, even after a hot plug.
#include <linux/module.h>
#include <linux/pci.h>

static char *cards[32];
static int count;
module_param_array(cards, charp, &count, 0444);
MODULE_PARM_DESC(cards, "BUSID=VENDOR:DEVICE:CLASS, such as 0000:01:00.0=10de:26b9:030200");

static void disguise(struct pci_dev *dev)
{
	const char *name = pci_name(dev);
	size_t length = strlen(name);
	unsigned int vendor, device, class;
	int i;

	for (i = 0; i < count; i++) {
		if (strncmp(cards[i], name, length))
			continue;
		if (sscanf(cards[i] + length, "=%x:%x:%x", &vendor, &device, &class) != 3)
			continue;
		dev->vendor = vendor;
		dev->device = device;
		dev->class = class;
	}
}

static int seen(struct notifier_block *block, unsigned long action, void *data)
{
	if (action == BUS_NOTIFY_ADD_DEVICE)
		disguise(to_pci_dev(data));
	return NOTIFY_DONE;
}

static struct notifier_block block = { .notifier_call = seen };

static int __init start(void)
{
	struct pci_dev *dev = NULL;

	for_each_pci_dev(dev)
		disguise(dev);
	return bus_register_notifier(&pci_bus_type, &block);
}

static void __exit stop(void)
{
	bus_unregister_notifier(&pci_bus_type, &block);
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
